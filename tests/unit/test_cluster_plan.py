"""Plans for hosts that do not exist yet: where groups lie, what it costs, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sky_monarch.config import load_job
from sky_monarch.errors import ConfigError
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.offers import known_offers
from sky_monarch.provision.provider import planned_price

BASE = "name: demo\nreplicas: 4\nranks_per_replica: 2\nrun: python train.py\n"


def plan(text: str, base: str = BASE):
    return plan_clusters(load_job(base + text + "\n"))


def first(text: str, base: str = BASE):
    return plan(text, base).choices[0]


def tasks(choice):
    return dict(choice.documents())


def refusal(text: str, base: str = BASE) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(text, base)
    return caught.value


# --- equal intent ---------------------------------------------------------------------------------

cases = st.sampled_from([str.upper, str.lower, str.title])
around = st.sampled_from(["{}", "AMD {}", "AMD Instinct {}", "amd-instinct-{}", "Instinct {} OAM"])
forms = st.sampled_from(
    [
        "'{name}:{count}'",
        "'{name} : {count}'",
        "{{'{name}': {count}}}",
        "['{name}:{count}']",
        "'  {name}:{count} '",
    ]
)
places = st.sampled_from(
    [("k8s/ctx", "kubernetes/ctx"), ("k8s", "Kubernetes"), ("runpod", "RunPod"), ("oci", "Oracle")]
)


@settings(max_examples=20, deadline=None)
@given(case=cases, around=around, form=forms, count=st.sampled_from([1, 2]), spellings=places)
def test_equal_intent_gives_an_equal_plan_and_an_equal_hash(case, around, form, count, spellings):
    spelt = form.format(name=around.format(case("MI300X")), count=count)
    base = BASE.replace("ranks_per_replica: 2\n", "")

    one = plan(f"infra: {spellings[0]}\nresources: {{accelerators: MI300X:{count}}}", base)
    other = plan(f"infra: {spellings[1]}\nresources: {{accelerators: {spelt}}}", base)

    assert one == other
    assert one.digest == other.digest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("run: 'x'", 'run: "x\\n"'),
        ("run: x", "run: |\n  x\n"),
        ("run: x", "run: |+\n  x\n\n\n"),
        ("run: x\nsetup: pip list", "run: 'x '\nsetup: |\n  pip list\n"),
    ],
)
def test_line_ends_behind_a_command_are_no_other_intent(one, other):
    jobs = [load_job(f"name: demo\nreplicas: 2\ninfra: slurm\n{text}\n") for text in (one, other)]

    assert jobs[0].digest() == jobs[1].digest()
    assert plan_clusters(jobs[0]).digest == plan_clusters(jobs[1]).digest


def test_a_line_that_goes_on_keeps_its_end():
    assert load_job('name: x\nreplicas: 1\nrun: "x \\\\\\n"\n').run == "x \\\n"


def test_what_is_left_out_and_what_is_written_out_are_one_intent():
    short = plan("infra: runpod\nresources: {accelerators: MI300X:2}")
    image = short.choices[0].image
    long = plan(
        "infra: runpod\nhead: cluster\nplacement: same-zone\nsync: every_step\nmin_replicas: 1\n"
        f"resources: {{accelerators: [MI300X:2], use_spot: false, image: '{image}', gpus_per_host: 8}}"
    )

    assert short.digest == long.digest


def test_the_order_of_any_of_means_nothing_and_that_of_ordered_does():
    options = [
        "{infra: oci, accelerators: MI300X:8}",
        "{infra: runpod}",
        "{infra: runpod, use_spot: true}",
        "{infra: do}",
    ]
    text = "infra: k8s\nresources: {{accelerators: MI300X:2, {}: [{}]}}"

    plans = [plan(text.format("any_of", ", ".join(order))) for order in itertools.permutations(options)]
    assert len({found.digest for found in plans}) == 1
    assert len({found.choices for found in plans}) == 1
    ordered = [plan(text.format("ordered", ", ".join(order))) for order in itertools.permutations(options)]
    assert len({found.digest for found in ordered}) == len(ordered)
    for order, found in zip(itertools.permutations(options), ordered, strict=True):
        wanted = [(one.split(" ")[1].strip(",}"), "use_spot" in one) for one in order]
        assert [(choice.infra, choice.use_spot) for choice in found.choices] == wanted


@pytest.mark.parametrize(
    "change",
    [
        "replicas: 3",
        "run: python other.py",
        "envs: {A: b}",
        "infra: oci",
        "resources: {accelerators: MI300X:1}",
    ],
)
def test_another_intent_has_another_hash(change):
    text = "infra: runpod\nresources: {accelerators: MI300X:2}\n"
    key = change.split(":")[0]
    other = "".join(
        line for line in (BASE + text).splitlines(keepends=True) if not line.startswith(f"{key}:")
    )

    assert plan_clusters(load_job(f"{other}{change}\n")).digest != plan(text).digest


def test_prices_are_no_part_of_the_hash():
    known = known_offers()
    runpod = known.clouds["runpod"]
    dearer = [
        dataclasses.replace(offer, usd_per_hour=offer.count * 99.0) for offer in runpod.offers if offer.count
    ]
    clouds = {**known.clouds, "runpod": dataclasses.replace(runpod, offers=tuple(dearer))}
    options = "any_of: [{infra: runpod}, {infra: oci}]"
    job = load_job(f"{BASE}resources: {{accelerators: MI300X:2, {options}}}\n")

    today = plan_clusters(job)
    changed = plan_clusters(job, snapshot=dataclasses.replace(known, clouds=clouds))

    assert [choice.infra for choice in today.choices] == ["runpod", "oci"]
    assert [choice.infra for choice in changed.choices] == ["oci", "runpod"]
    assert changed.digest == today.digest


# --- where groups lie -----------------------------------------------------------------------------


def test_on_runpod_all_groups_share_one_pod():
    choice = first("infra: runpod\nresources: {accelerators: MI300X:2}")

    assert [(host.cluster, host.groups) for host in choice.hosts] == [("demo-h0", (0, 1, 2, 3))]
    assert (choice.accelerator, choice.instance) == ("MI300X:8", "8x_MI300X_SECURE")
    assert choice.usd_per_hour == pytest.approx(8 * 2.39)
    assert choice.price_day
    assert choice.price_source.startswith("https://")
    assert (choice.head.kind, choice.head.cluster, choice.head.own) == ("cluster", "demo-h0", False)
    (task,) = tasks(choice).values()
    assert task["resources"]["accelerators"] == "MI300X:8"
    assert task["resources"]["image_id"].startswith("docker:rocm/")
    assert "network_tier" not in task["resources"], "RunPod has none: SkyPilot would find no host"
    assert task["num_nodes"] == 1


def test_groups_that_could_not_talk_are_refused_before_money_is_spent():
    error = refusal("infra: runpod\nresources: {accelerators: MI300X:4}")

    assert "4 groups need 2 hosts of RunPod" in str(error)
    assert "mapped ports" in str(error)
    assert "sync: diloco(20)" in error.hint
    assert "one host" in error.hint


def test_groups_that_could_not_talk_may_train_semi_synchronously():
    choice = first("infra: runpod\nsync: diloco(20)\nplacement: any\nresources: {accelerators: MI300X:4}")

    assert [host.groups for host in choice.hosts] == [(0, 1), (2, 3)]
    assert any("demo-h0 to demo-h1 reach nobody but the head" in note for note in choice.notes)
    assert any("sends and gets 1.5 times the bytes" in note for note in choice.notes), "4 groups, by a ring"
    assert any("charge for what leaves them" in note for note in choice.notes)
    assert choice.head.kind == "here", "nobody could dial a head that is a pod, too"
    assert list(tasks(choice)) == ["demo-h0", "demo-h1"]
    asked = first(
        "infra: runpod\nsync: diloco(20)\nplacement: any\nhead: cluster\nresources: {accelerators: MI300X:4}"
    )
    assert asked.head.own, "whoever insists is told at the launch"


@pytest.mark.parametrize(("infra", "gpu"), [("runpod", "MI300X:8"), ("azure", "MI300X:8")])
def test_without_a_common_network_two_hosts_are_refused(infra, gpu):
    assert "reach each other" in str(refusal(f"infra: {infra}\nresources: {{accelerators: {gpu}}}"))


def test_a_group_of_several_hosts_has_a_cluster_for_each_where_they_share_a_network():
    choice = first(
        "infra: oci\nreplicas: 2\nresources: {accelerators: MI300X:16, memory_gib: 128+}",
        BASE.replace("replicas: 4\n", ""),
    )

    assert [(host.groups, host.node) for host in choice.hosts] == [((0,), 0), ((0,), 1), ((1,), 0), ((1,), 1)]
    assert choice.reachability == "same network"
    assert any("the loss of one ends it on all of them" in note for note in choice.notes)
    assert choice.usd_per_hour == pytest.approx(4 * 48 + 0.037), "and the head"
    task = tasks(choice)["demo-h0"]
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (1, "MI300X:8")
    assert task["resources"]["memory"] == "64+", "what a group asks for, shared by its hosts"
    for infra, why in (("runpod", "mapped ports only"), ("azure", "public ports only")):
        said = str(refusal(f"infra: {infra}\nresources: {{accelerators: MI300X:16}}"))
        assert "each host is a cluster of its own" in said
        assert why in said


def test_ranks_that_the_hosts_of_a_group_cannot_share_are_refused():
    base = BASE.replace("ranks_per_replica: 2", "ranks_per_replica: 3")

    assert "3 ranks" in str(refusal("infra: oci\nresources: {accelerators: MI300X:16}", base))


def test_on_slurm_each_group_is_a_job_of_its_own_on_the_nodes_own_rocm():
    choice = first("infra: slurm/c1/gpu\nresources: {accelerators: MI300X:2}")

    assert [host.groups for host in choice.hosts] == [(0,), (1,), (2,), (3,)]
    assert (choice.head.kind, choice.image, choice.usd_per_hour) == ("here", None, None)
    for task in tasks(choice).values():
        assert task["resources"].pop("autostop") == {"idle_minutes": 10, "down": True}
        assert task["resources"] == {
            "infra": "slurm/c1/gpu",
            "accelerators": "MI300X:2",
            "network_tier": "best",
        }
    assert any("ROCm 6.1 or newer" in note for note in choice.notes)


def test_gpus_per_host_lets_groups_share_hosts():
    choice = first(
        "infra: k8s\nresources: {accelerators: MI300X:2, gpus_per_host: 4, cpus: 8+, memory_gib: 64}"
    )

    assert [host.groups for host in choice.hosts] == [(0, 1), (2, 3)]
    resources = tasks(choice)["demo-h1"]["resources"]
    assert (resources["accelerators"], resources["cpus"], resources["memory"]) == ("MI300X:4", "16+", "128")
    assert any("kubectl label node NODE skypilot.co/accelerator=mi300x" in note for note in choice.notes)


@pytest.mark.parametrize("infra", ["k8s", "slurm/c1/gpu", "azure/eastus", "local"])
def test_a_limit_in_money_that_limits_nothing_for_want_of_a_price_is_said(infra):
    gpus = "{}" if infra == "local" else "{accelerators: MI300X:2}"
    said = "budget.max_usd does not limit the run"

    def notes(limits):
        return " ".join(first(f"infra: {infra}\nhead: here\nresources: {gpus}\nbudget: {limits}").notes)

    assert f"{said}; write budget.max_hours, which does" in notes("{max_usd: 10}")
    assert f"{said}; budget.max_hours does" in notes("{max_usd: 10, max_hours: 2}")
    assert said not in notes("{max_hours: 2}")


def test_a_limit_in_money_counts_where_a_price_is_known():
    choice = first("infra: oci\nresources: {accelerators: MI300X:2}\nbudget: {max_usd: 10}")

    assert not any("max_usd" in note for note in choice.notes)


def test_idle_gpus_are_said():
    choice = first("infra: oci\nresources: {accelerators: MI300X:3}")

    assert any(note.startswith("4 of 16 GPUs") for note in choice.notes)


def test_hosts_of_one_zone_follow_the_first_unless_the_job_names_the_zone():
    follows = "demo-h0 chooses the zone, the others follow it"

    assert follows in first("infra: oci\nhead: here\nresources: {accelerators: MI300X:8}").notes
    assert follows in first("infra: oci/eu\nresources: {accelerators: MI300X:8}").notes
    assert follows not in first("infra: oci/eu/ad-1\nresources: {accelerators: MI300X:8}").notes
    assert (
        follows
        not in first(
            "infra: oci\nsync: diloco(20)\nplacement: any\nresources: {accelerators: MI300X:8}"
        ).notes
    )


@pytest.mark.parametrize("gpus", [8, 2])
@pytest.mark.parametrize(("cloud", "has_zones"), [("oci", True), ("do", False)])
def test_a_head_that_chooses_the_region_for_the_gpus_is_said_with_what_helps(cloud, has_zones, gpus):
    resources = f"resources: {{accelerators: MI300X:{gpus}, gpus_per_host: 8}}"
    notes = first(f"infra: {cloud}\n{resources}").notes

    assert sum("in a region that SkyPilot chooses" in note for note in notes) == 1
    assert any(f"write infra: {cloud}/REGION" in note for note in notes)
    zone = "demo-h0 chooses the zone in the region of demo-head, the others follow it"
    assert (zone in notes) == (has_zones and gpus == 8)
    assert not any("demo-h0 chooses the zone, the others" in note for note in notes)
    for named in (f"infra: {cloud}/somewhere", f"infra: {cloud}\nhead: here", "infra: k8s"):
        assert not any("in a region that" in note for note in first(f"{named}\n{resources}").notes)


def test_this_machine_is_one_host_without_tasks():
    found = plan("resources: {accelerators: MI300X:2}")

    assert [choice.infra for choice in found.choices] == ["local"]
    assert found.choices[0].hosts[0].groups == (0, 1, 2, 3)
    assert list(found.choices[0].documents()) == []


def test_without_gpus_hosts_get_no_rocm():
    task = tasks(first("infra: k8s\nresources: {cpus: 4}"))["demo-h3"]

    assert "envs" not in task
    assert task["resources"] == {"infra": "k8s", "autostop": {"idle_minutes": 10, "down": True}, "cpus": "4"}


# --- candidates -----------------------------------------------------------------------------------


def test_candidates_come_cheapest_first_and_those_without_a_price_last():
    found = plan(
        "resources: {accelerators: MI300X:2, any_of: [{infra: azure}, {infra: oci}, {infra: do}, {infra: runpod}]}"
    )

    assert [(choice.infra, choice.usd_per_hour) for choice in found.choices] == [
        ("runpod", pytest.approx(19.12)),
        ("do", pytest.approx(20.72)),
        ("oci", pytest.approx(48.037)),
        ("azure", None),
    ]
    assert found.refused == ()


def test_spot_comes_before_what_costs_the_same():
    found = plan(
        "infra: runpod\nresources: {accelerators: MI300X:2, any_of: [{use_spot: false}, {use_spot: true}]}"
    )

    assert [choice.use_spot for choice in found.choices] == [True, False]
    assert tasks(found.choices[0])["demo-h0"]["resources"]["use_spot"] is True
    assert "use_spot" not in tasks(found.choices[1])["demo-h0"]["resources"]


def test_a_candidate_that_cannot_be_is_kept_with_its_reason_while_others_can():
    found = plan("resources: {accelerators: MI355X:2, ordered: [{infra: runpod}, {infra: oci}]}")

    assert [choice.infra for choice in found.choices] == ["oci"]
    (refused,) = found.refused
    assert (refused.infra, refused.wanted) == ("runpod", "MI355X:2")
    assert "no MI355X is known there" in refused.reason
    assert "oci has it" in refused.fix


def test_all_reasons_are_named_where_no_candidate_can_be():
    error = refusal(
        "resources: {accelerators: MI210:2, any_of: [{infra: runpod}, {infra: oci, use_spot: true}]}"
    )

    assert "runpod" in str(error)
    assert "oci" in str(error)
    assert error.exit_code == 2


# --- what is in the tasks -------------------------------------------------------------------------


def test_no_value_of_the_users_is_in_a_task_or_in_the_plan():
    text = "infra: oci\nenvs: {KEY: canary1}\nsecrets: {TOKEN: canary2}\nresources: {accelerators: MI300X:2}"
    found = plan(text)

    shown = json.dumps(found.to_json()) + repr(found)
    assert "canary" not in shown
    other = plan(text.replace("canary2", "canary3"))
    assert other.digest == found.digest, "a hash gives no way to guess a secret"


def test_rccl_and_rocr_are_set_once_unless_the_job_does_so():
    first_task = next(iter(tasks(first("infra: k8s\nresources: {accelerators: MI300X:2}")).values()))
    host = tasks(first("infra: k8s\nenvs: {NCCL_DEBUG: INFO}\nresources: {accelerators: MI300X:2}"))[
        "demo-h0"
    ]

    assert "envs" not in first_task, "a head without GPUs needs none"
    assert "NCCL_DEBUG" not in host["envs"]
    assert host["envs"]["HSA_NO_SCRATCH_RECLAIM"] == "1"
    assert not any("VISIBLE_DEVICES" in name for name in host["envs"]), "the agent masks devices"


def test_planning_asks_nobody_and_changes_nothing(monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("a plan is pure")

    job = load_job(f"{BASE}infra: runpod\nresources: {{accelerators: MI300X:2}}\n")
    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr("subprocess.Popen", forbidden)
    found = plan_clusters(job)

    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]
    cluster, task = next(found.choices[0].documents())
    task["name"] = "changed"
    assert dict(found.choices[0].documents())[cluster]["name"] == cluster, "each caller has tasks of its own"
    assert json.loads(json.dumps(found.to_json()))["choices"][0]["infra"] == "runpod"


def test_a_thousand_groups_are_planned_at_once():
    found = plan(
        "infra: slurm\nresources: {accelerators: MI300X:8}", BASE.replace("replicas: 4", "replicas: 1000")
    )

    assert len(found.choices[0].hosts) == 1000
    assert len({cluster for cluster, _ in found.choices[0].tasks}) == 1000


def test_a_folder_for_checkpoints_has_to_be_shared_by_the_hosts_and_the_plan_says_so():
    def notes(to: str) -> str:
        where = (
            f"checkpoint: {{to: {to}, every_steps: 5}}\ninfra: slurm\nresources: {{accelerators: MI300X:2}}"
        )
        return "\n".join(first(where).notes)

    assert "must be a folder that all hosts share" in notes("/shared/ckpt")
    assert "share" not in notes("s3://bucket/ckpt")


# --- the head -------------------------------------------------------------------------------------


def test_the_price_of_a_head_that_is_a_cluster_is_in_the_sum_and_none_of_a_host_s_share():
    text = "infra: oci\nresources: {accelerators: MI300X:4, gpus_per_host: 8}\n"
    here, away = first(text + "head: here"), first(text + "head: cluster")

    assert (here.head_usd_per_hour, away.head_usd_per_hour) == (None, 0.037)
    assert away.usd_per_hour == pytest.approx(here.usd_per_hour + 0.037)
    assert any("$/H has 0.037 for demo-head (VM.Standard.E4.Flex$_2_8)" in note for note in away.notes)
    values = away.to_json()
    assert planned_price(values, "demo-head") == 0.037
    assert planned_price(values, "demo-h1") == pytest.approx(here.usd_per_hour / 2)
    assert planned_price(values, "demo-h7") == pytest.approx(here.usd_per_hour / 2), (
        "one that it is scaled to"
    )
    unknown = first("infra: do\nresources: {accelerators: MI300X:8}")
    assert unknown.head_usd_per_hour is None
    assert any("demo-head (2 CPUs) is not known, and not in the sum" in note for note in unknown.notes)


def test_a_head_may_be_a_job_of_slurm_which_opens_no_port_for_it():
    choice = first("infra: slurm/c1/gpu\nhead: cluster\nresources: {accelerators: MI300X:2}")

    task = tasks(choice)["demo-head"]
    assert {key: task["resources"][key] for key in ("infra", "cpus", "memory")} == {
        "infra": "slurm/c1/gpu",
        "cpus": "2+",
        "memory": "8+",
    }
    assert "ports" not in task["resources"]
    assert any("a time limit or a pre-emption" in note for note in choice.notes)
    assert first("infra: slurm/c1/gpu\nresources: {accelerators: MI300X:2}").head.kind == "here"


# --- spare hosts ----------------------------------------------------------------------------------


def test_a_spare_host_is_one_more_of_the_same_kind_without_groups_and_in_the_price():
    text = "infra: oci\nresources: {accelerators: MI300X:4, gpus_per_host: 8, cpus: 8+}\nhead: here"
    plain, spared = first(text), first(text + "\nrecovery: {spare: 2}")

    assert [(host.cluster, host.groups) for host in spared.hosts] == [
        *((host.cluster, host.groups) for host in plain.hosts),
        ("demo-h2", ()),
        ("demo-h3", ()),
    ]
    each = plain.usd_per_hour / 2
    assert spared.usd_per_hour == pytest.approx(plain.usd_per_hour + 2 * each)
    found = tasks(spared)
    assert found["demo-h3"]["resources"] == found["demo-h0"]["resources"], "as large as the fullest of them"
    assert any("2 hosts are spare ones" in note for note in spared.notes)


def test_with_a_spare_host_any_may_get_the_groups_of_any_other_and_is_as_large():
    sizes = "{accelerators: MI300X:4, gpus_per_host: 8, cpus: 8, memory_gib: 64}"
    text = f"infra: oci\nreplicas: 3\nresources: {sizes}\nhead: here"
    base = "name: demo\nranks_per_replica: 2\nrun: python train.py\n"
    plain, spared = (plan(text + more, base).choices[0] for more in ("", "\nrecovery: {spare: 1}"))

    asked = [(task["resources"]["cpus"], task["resources"]["memory"]) for task in tasks(plain).values()]
    assert asked == [("16", "128"), ("8", "64")], "each as its groups need"
    # demo-h0 is lost: its two go to demo-h2. Then demo-h1: its one goes to demo-h0. Then demo-h2, and all that is left
    # for its two is demo-h1, which was made for one.
    asked = [(task["resources"]["cpus"], task["resources"]["memory"]) for task in tasks(spared).values()]
    assert asked == [("16", "128")] * 3


def test_a_job_with_another_number_of_spare_hosts_is_another_plan():
    text = "infra: oci\nresources: {accelerators: MI300X:4, gpus_per_host: 8, cpus: 8+}\nhead: here"
    assert plan(text).digest != plan(text + "\nrecovery: {spare: 2}").digest
