#!/usr/bin/env bash
# What SkyPilot runs on a host: `setup` installs sky-monarch beside the host's own torch, `run` is the agent.
# `setup-head` and `run-head` are the same for a cluster that is the head: in an environment of its own (homes may be
# shared), with all that the controller needs, from the package index, and without torch.
#
# No secret and nothing of the job is in here. What differs comes in the environment:
#   SKY_MONARCH_SHIP    what was shipped, <version>-<hash>: the folder of this script below ~/.sky-monarch/ship
#   SKY_MONARCH_FOLDER  the agent's folder below ~/.sky-monarch/runs, <run id>/<host>-a<attempt>
set -euo pipefail

say() { printf 'sky-monarch: %s\n' "$*" >&2; }

fail() {
    say "error: $1"
    say "hint: $2"
    exit 1
}

: "${SKY_MONARCH_SHIP:?is not set}"
ship=$HOME/.sky-monarch/ship/$SKY_MONARCH_SHIP
venv=$HOME/.sky-monarch/$SKY_MONARCH_SHIP
version=${SKY_MONARCH_SHIP%-*}
needed='torchft==0.2.*'
unset PYTHONHOME # of another Python

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has() { "$1" -P -c 'import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is None)' "$2" >/dev/null 2>&1; }

# The first Python that is new enough; of those rather one that has torch.
pick_python() {
    local name found=""
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        command -v "$name" >/dev/null && recent "$name" || continue
        if has "$name" torch; then
            command -v "$name"
            return
        fi
        found=${found:-$(command -v "$name")}
    done
    # A head needs none of the host's own packages: SkyPilot brings uv along, and uv a Python.
    if [ -z "$found" ] && [ "$role" = head ]; then
        name=$(PATH=$PATH:$HOME/.local/bin command -v uv) && "$name" python install --quiet 3.12 >&2 &&
            found=$("$name" python find 3.12) || found=""
    fi
    if [ -z "$found" ]; then
        name=$(python3 --version 2>&1) || name="no python3"
        fail "this host has no Python 3.11 or newer ($name)" \
            "use an image with one (resources.image), or install python3.11 or newer on the host"
    fi
    printf '%s\n' "$found"
}

# Of a host whose Python is a virtual environment itself, a new one would see only what lies below that one.
link_parent() {
    "$1" -I - "$venv" <<'EOP'
import pathlib, site, sys

if sys.prefix != sys.base_prefix:
    inner = pathlib.Path(sys.argv[1], "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (inner / "_host.pth").write_text("".join(lines))
EOP
}

# The job's own `pip install` must end up in the environment, not in the host's Python.
give_pip() {
    local name
    if ! has "$venv/bin/python" pip && ! "$venv/bin/python" -P -m ensurepip >/dev/null 2>&1; then
        fail "this host's Python has no pip ($1)" \
            "install it on the host, or in its image (Debian and Ubuntu: apt-get install python3-pip)"
    fi
    for name in pip pip3; do
        printf '#!/bin/sh\nexec "%s" -P -m pip "$@"\n' "$venv/bin/python" >"$venv/bin/$name"
        chmod 755 "$venv/bin/$name"
    done
}

# What a training session needs beyond torch. The host's torch is pinned: pip may refuse, never replace it.
add_torchft() {
    local pinned
    if ! has "$venv/bin/python" torch; then
        say "this host's Python has no torch: the job's setup has to install it, where the job needs it"
        return
    fi
    has "$venv/bin/python" torchft && return
    pinned=$venv/torch.txt
    "$venv/bin/python" -P -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$pinned"
    say "installing $needed beside $(cat "$pinned")"
    "$venv/bin/python" -P -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 15 \
        --constraint "$pinned" "$needed" ||
        say "warning: $needed was not installed; a script with a Session needs it (in the image, or by the job's setup)"
}

# What is installed is what was shipped, and its core loads on this system.
check() {
    local found
    found=$("$venv/bin/python" -P -c 'import sky_monarch, sky_monarch._core; print(sky_monarch.__version__)') ||
        fail "sky-monarch $version does not load on this host" \
            "its core was linked for another system: ship a manylinux wheel, named in SKY_MONARCH_WHEEL"
    [ "$found" = "$version" ] ||
        fail "this host has sky-monarch $found, and the run was launched by $version" \
            "remove $found from the host's image: a run is of one version"
}

# The agent is all that runs of us on a host, and it needs nothing else; whatever the index has stays out of it.
install_wheel() {
    local wheel
    wheel=$(printf '%s\n' "$ship"/*.whl)
    if [ "$role" = head ]; then # not isolated: pip's own settings may name a mirror
        "$venv/bin/python" -P -m pip install --quiet --disable-pip-version-check --retries 5 --timeout 30 "$wheel" ||
            fail "pip did not install $wheel and what it needs" "the head needs a package index: pip's settings name one"
        return
    fi
    "$venv/bin/python" -P -m pip --isolated install --quiet --disable-pip-version-check \
        --no-index --no-deps --no-compile --ignore-installed "$wheel" ||
        fail "pip did not take $wheel" "is it for another processor than this host's $(uname -m)?"
}

setup() {
    local python
    mkdir -p "${venv%/*}"
    if command -v flock >/dev/null; then # several hosts may share one home
        exec 9>"$venv.lock"
        flock -w 900 9 || fail "another host has been setting up $venv for 15 minutes" "look for it: fuser -v $venv.lock"
    fi
    if [ -e "$venv/ready" ]; then
        check
        return
    fi
    python=$(pick_python)
    rm -rf "$venv"
    "$python" -P -m venv --system-site-packages --without-pip "$venv" ||
        fail "$python cannot make a virtual environment" \
            "install its venv module (Debian and Ubuntu: apt-get install python3-venv)"
    link_parent "$python"
    give_pip "$python"
    install_wheel
    check
    [ "$role" = head ] || add_torchft
    touch "$venv/ready"
    say "$version is set up with $("$venv/bin/python" --version) of $python"
}

run() {
    [ -e "$venv/ready" ] || fail "sky-monarch is not set up on this host" "its setup failed: see the lines before"
    : "${SKY_MONARCH_FOLDER:?is not set}"
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
    # -P: a folder named sky_monarch in the working folder is not the one that was shipped.
    exec "$venv/bin/python" -P -m sky_monarch.agent --enrol "$HOME/.sky-monarch/runs/$SKY_MONARCH_FOLDER"
}

case ${1-} in
setup | run)
    role=host
    "$1"
    ;;
setup-head | run-head)
    role=head venv=$venv-head
    "${1%-head}"
    ;;
*) fail "usage: host.sh setup|run|setup-head|run-head" "SkyPilot's task calls it" ;;
esac
