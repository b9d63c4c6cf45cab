"""A disk that is full, or on which a process is killed before, or in the middle of, one of its operations.

A library that is loaded before libc's: the process does not know, and the file system is the real one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["FULL", "disk_environment"]

FULL = "disk-is-full"
"""While a file of this name lies in the folder, nothing in it can grow."""

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long left = -1;
static int torn;

/* The process ends at the nth operation from now, before it or in the middle. */
void disk_arm(long nth, int in_the_middle) { left = nth; torn = in_the_middle; }
long disk_left(void) { return left; }

static int ours(int fd, char *folder) {
    char link[64], path[PATH_MAX];
    const char *mine = getenv("DISK_FOLDER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = mine ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, mine, strlen(mine)) || path[strlen(mine)] != '/') return 0;
    strcpy(folder, mine);
    return 1;
}

static int dies(int fd) {
    char folder[PATH_MAX];
    if (left < 0 || !ours(fd, folder) || left-- > 0) return 0;
    return 1;
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

static int full(int fd, off_t end) {
    char folder[PATH_MAX];
    struct stat known;
    if (!ours(fd, folder)) return 0;
    strcat(folder, "/disk-is-full");
    return access(folder, F_OK) == 0 && fstat(fd, &known) == 0 && end > known.st_size;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t put(int fd, const void *data, size_t count, off_t at,
                   ssize_t (*next)(int, const void *, size_t, off_t)) {
    if (dies(fd)) {
        if (torn && count > 1) next(fd, data, count / 2, at);
        die();
    }
    if (full(fd, at + (off_t)count)) { errno = ENOSPC; return -1; }
    return next(fd, data, count, at);
}
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return put(fd, d, n, at, NEXT(pwrite)); }
ssize_t pwrite64(int fd, const void *d, size_t n, off_t at) { return put(fd, d, n, at, NEXT(pwrite)); }

ssize_t write(int fd, const void *data, size_t count) {
    if (dies(fd)) die();
    off_t at = lseek(fd, 0, SEEK_CUR);
    if (at >= 0 && full(fd, at + (off_t)count)) { errno = ENOSPC; return -1; }
    return NEXT(write)(fd, data, count);
}
int fsync(int fd) { if (dies(fd)) die(); return NEXT(fsync)(fd); }
int fdatasync(int fd) { if (dies(fd)) die(); return NEXT(fdatasync)(fd); }
int ftruncate(int fd, off_t size) {
    if (dies(fd)) die();
    if (full(fd, size)) { errno = ENOSPC; return -1; }
    return NEXT(ftruncate)(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int posix_fallocate(int fd, off_t at, off_t n) {
    return full(fd, at + n) ? ENOSPC : NEXT(posix_fallocate)(fd, at, n);
}
int posix_fallocate64(int fd, off_t at, off_t n) { return posix_fallocate(fd, at, n); }
"""


def disk_environment(folder: Path, build: Path) -> dict[str, str]:
    """The variables of a process whose files in ``folder`` lie on such a disk.

    Args:
        folder: Where it writes; no other folder is touched.
        build: Where the library is built; it stays until the process has ended.
    """
    library = build / "disk.so"
    if not library.exists():
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-", "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "DISK_FOLDER": str(folder.resolve())}
