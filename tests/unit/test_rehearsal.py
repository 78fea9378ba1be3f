"""What a rehearsal's numbers are judged to mean: many made-up measurements, and the names that come out."""

from __future__ import annotations

import itertools
import json

import pytest
from factories import plan

from launcher.errors import Problem, RecipeError
from launcher.lab.rehearsal.outliers import slow_devices, slow_links, slow_writers, stragglers
from launcher.lab.rehearsal.run import LARGE, SMALL, bucket_bytes, message_sizes, plan_rehearsal
from launcher.lab.rehearsal.verdicts import TITLES, Planned, judge, unshared
from launcher.machine.interfaces import choose_interface
from launcher.plan.rehearsal import rehearsal_of
from launcher.train.rehearsal.run import ends_of

FAST, GB = 10e9, 1e9


def links(ends, rates=None, latencies=None):
    """Every directed link at FAST and 20 us, but those that are named."""
    rates, latencies = rates or {}, latencies or {}
    return [
        {"from": a, "to": b, "bytes_per_s": rates.get((a, b), FAST), "latency_s": latencies.get((a, b), 2e-5)}
        for a, b in itertools.permutations(ends, 2)
    ]


def of_end(end, ends, rate):
    """Both directions of all links of an end."""
    return {pair: rate for pair in itertools.permutations(ends, 2) if end in pair}


def named(found):
    return {(slow.what, slow.ends) for slow in found}


class TestLinks:
    @pytest.mark.parametrize("ends", [range(2), range(3), range(8), [0, 8, 16, 24]])
    def test_equal_links_name_nobody(self, ends):
        assert slow_links(links(ends), absurd=True) == []

    @pytest.mark.parametrize("count", [3, 4, 9])
    @pytest.mark.parametrize("slow", [0, 1, 2])
    def test_one_slow_machine_is_named_in_both_directions(self, count, slow):
        found = slow_links(links(range(count), of_end(slow, range(count), 0.9 * GB)), absurd=True)
        assert named(found) == {("sends", (slow,)), ("receives", (slow,))}
        assert all(one.value == 0.9 * GB and one.normal == FAST and one.bad for one in found)

    def test_a_machine_that_only_sends_slowly(self):
        rates = {(2, other): 1 * GB for other in (0, 1, 3)}
        assert named(slow_links(links(range(4), rates), absurd=True)) == {("sends", (2,))}

    def test_a_machine_that_only_receives_slowly_among_three(self):
        rates = {(0, 1): 1 * GB, (2, 1): 1 * GB}
        assert named(slow_links(links(range(3), rates), absurd=True)) == {("receives", (1,))}

    def test_two_slow_machines_of_five(self):
        rates = of_end(1, range(5), 2 * GB) | of_end(4, range(5), 3 * GB)
        found = slow_links(links(range(5), rates), absurd=True)
        assert {one.ends for one in found} == {(1,), (4,)}

    def test_one_slow_link_between_good_machines(self):
        rates = {(0, 1): 1 * GB, (1, 0): 1 * GB}
        found = slow_links(links(range(4), rates), absurd=True)
        assert named(found) == {("link", (0, 1)), ("link", (1, 0))}

    @pytest.mark.parametrize("factor", [0.55, 0.7, 0.9, 1.0])
    def test_noise_names_nobody(self, factor):
        rates = of_end(1, range(4), factor * FAST)
        assert slow_links(links(range(4), rates), absurd=True) == []

    def test_wild_noise_on_single_links_names_no_machine(self):
        rates = {(0, 1): 0.3 * FAST, (2, 3): 0.4 * FAST, (1, 2): 0.45 * FAST}
        assert all(one.what == "link" for one in slow_links(links(range(4), rates), absurd=True))

    def test_all_slow_alike_is_no_outlier_but_absurd_between_machines(self):
        slow = links(range(3), dict.fromkeys(itertools.permutations(range(3), 2), 1e6))
        assert {one.what for one in slow_links(slow, absurd=True)} == {"absurd"}
        assert slow_links(slow, absurd=False) == []

    def test_two_machines_have_no_median(self):
        assert slow_links(links(range(2), {(0, 1): 1 * GB, (1, 0): 1.1 * GB}), absurd=True) == []

    def test_two_machines_on_an_absurd_line(self):
        found = slow_links(links(range(2), {(0, 1): 1.2e6, (1, 0): 1.2e6}), absurd=True)
        assert named(found) == {("absurd", (0, 1)), ("absurd", (1, 0))}

    @pytest.mark.parametrize(("rate", "bad"), [(0.2, False), (0.05, True)])
    def test_two_machines_with_unlike_directions(self, rate, bad):
        (found,) = slow_links(links(range(2), {(1, 0): rate * FAST}), absurd=True)
        assert (found.what, found.ends, found.bad) == ("one-way", (1, 0), bad)

    def test_directions_that_differ_by_noise(self):
        assert slow_links(links(range(2), {(1, 0): 0.4 * FAST}), absurd=True) == []

    def test_a_machine_that_answers_late(self):
        late = {pair: 0.02 for pair in itertools.permutations(range(3), 2) if 2 in pair}
        assert named(slow_links(links(range(3), latencies=late), absurd=True)) == {("late", (2,))}

    @pytest.mark.parametrize("latency", [1.5e-4, 9e-4])
    def test_a_latency_below_a_millisecond_is_no_verdict(self, latency):
        late = {pair: latency for pair in itertools.permutations(range(3), 2) if 2 in pair}
        assert slow_links(links(range(3), latencies=late), absurd=True) == []

    def test_nothing_measured(self):
        assert slow_links([], absurd=True) == []


def devices(speeds, name="NVIDIA A100"):
    return [{"rank": r, "name": name, "best_flops": s * 1e12} for r, s in enumerate(speeds)]


class TestDevices:
    @pytest.mark.parametrize("speeds", [[250], [250, 240], [250, 240, 230, 245, 251, 249, 238, 244]])
    def test_cards_of_one_model_differ_a_little(self, speeds):
        assert slow_devices(devices(speeds)) == []

    def test_a_throttled_card(self):
        (found,) = slow_devices(devices([250, 248, 251, 120]))
        assert (found.ends, found.value, found.bad) == ((3,), 120e12, True)

    def test_of_two_cards_the_slower_one_is_named(self):
        (found,) = slow_devices(devices([90, 250]))
        assert found.ends == (0,)

    def test_a_slower_model_is_no_throttled_card(self):
        mixed = [*devices([250, 250]), {"rank": 2, "name": "NVIDIA T4", "best_flops": 40e12}]
        assert slow_devices(mixed) == []

    def test_a_cpu_is_warned_about_later(self):
        assert slow_devices(devices([1, 0.6], "cpu")) == []
        (found,) = slow_devices(devices([1, 0.4], "cpu"))
        assert not found.bad


def waits(rows):
    """(work ms, wait ms, steps in which it was last)"""
    return [
        {"rank": r, "work_s": w / 1e3, "wait_s": s / 1e3, "last_in": last, "steps": 12}
        for r, (w, s, last) in enumerate(rows)
    ]


class TestWaiting:
    def test_the_rank_that_all_wait_for(self):
        (found,) = stragglers(waits([(20, 40, 0), (20, 41, 0), (60, 1, 12)]), on_cpu=False)
        assert found.ends == (2,)
        assert found.value == pytest.approx(39.5 / 61)
        assert found.bad

    @pytest.mark.parametrize(
        "rows",
        [
            [(20, 5, 4), (21, 5, 4), (20, 5, 4)],
            [(20, 40, 0), (20, 41, 5), (60, 1, 7)],  # not the same one every time
            [(20, 40, 0), (20, 1, 12), (20, 40, 0)],  # it does not work longer: it sits nearer
            [(20, 3, 0), (21, 1, 12), (20, 3, 0)],  # it costs nothing
            [(20, 0, 12)],
        ],
    )
    def test_nobody(self, rows):
        assert stragglers(waits(rows), on_cpu=False) == []

    def test_a_cpu_must_be_twice_as_slow(self):
        rows = waits([(20, 15, 0), (35, 1, 12)])
        assert stragglers(rows, on_cpu=True) == []
        assert stragglers(rows, on_cpu=False)


class TestWriters:
    def test_one_slow_mount(self):
        (found,) = slow_writers({0: 1.0, 8: 0.2, 16: 1.1}, 1 / 3)
        assert (found.ends, found.value, found.normal) == ((8,), 0.2, 1.05)

    @pytest.mark.parametrize("rates", [{}, {0: 1.0}, {0: 1.0, 8: 0.01}, {0: 1.0, 8: 0.5, 16: 0.9}])
    def test_nobody(self, rates):
        assert slow_writers(rates, 1 / 3) == []

    @pytest.mark.parametrize(
        ("blind", "machines", "alone"),
        [
            ({0: {2}, 1: {2}, 2: {0, 1}}, [0, 1, 2], [2]),
            ({0: {1}, 1: {0}}, [0, 1], []),
            ({0: {1, 2}, 1: {0, 2}, 2: {0, 1}}, [0, 1, 2], [0, 1, 2]),
            ({3: {0, 1, 2}, 0: {3}, 1: {3}, 2: {3}}, [0, 1, 2, 3], [3]),
            ({0: {2}}, [0, 1, 2], []),
        ],
    )
    def test_who_is_on_a_disk_of_its_own(self, blind, machines, alone):
        assert unshared(blind, machines) == alone


def rank(number, *, host="gpu00", node=0, interface="eth0", torch="2.13.0", **more):
    return {
        "rank": number, "local_rank": 0, "node": node, "host": host, "pid": 100 + number,
        "interface": interface, "address": "10.0.0.1", "interface_by": "GLOO_SOCKET_IFNAME",
        "infiniband": [], "filesystem": "nfs4 disk:/runs", "versions": {"torch": torch}, **more,
    }  # fmt: skip


def written(number, *, size=GB, seconds=1.0, full=2 * GB, unseen=(), read=None, error=None):
    return {
        "rank": number, "full_bytes": full, "error": error, "bytes": int(size), "seconds": seconds,
        "hash_s": 1e-9, "unseen": list(unseen), "seen_after_s": 0.0, "read": read,
    }  # fmt: skip


def measured(count=3, **changes):
    """Machines with a rank each, all of them well."""
    found = {
        "backend": "nccl",
        "met_s": 1.0,
        "joined_s": 8.0,
        "ranks": [rank(n, host=f"gpu{n:02d}", node=n) for n in range(count)],
        "all_reduce": [
            {"bytes": 4096, "asked_bytes": 4096, "median_s": 5e-5, "bus_bytes_per_s": 1e8, "right": True},
            {"bytes": 10**8, "asked_bytes": 10**8, "median_s": 0.02, "bus_bytes_per_s": 7e9, "right": True},
        ],
        "links": links(range(count)),
        "devices": [{**one, "device": "cuda:0", "flops": 240e12} for one in devices([250] * count)],
        "waiting": waits([(20, 2, 4)] * count),
        "save": [written(n) for n in range(count)],
    }
    return {**found, **changes}


PLANNED = Planned("deepspeed", 3, on_cpu=False, gradient_bytes=5 * 10**8, stop_seconds=10.0)


def verdicts(found, planned=PLANNED, problems=()):
    return {finding.id: finding.verdict for finding in judge(found, planned, problems)}


def bad(found, planned=PLANNED):
    return {name for name, verdict in verdicts(found, planned).items() if verdict.status == "fail"}


class TestVerdicts:
    def test_a_good_rehearsal(self):
        found = verdicts(measured())
        assert set(found) == set(TITLES)
        assert {verdict.status for verdict in found.values()} == {"ok"}
        assert "about 100 ms" in found["rehearsal-all-reduce"].message
        assert found["rehearsal-stop"].found == (
            "6 GB, about 4 s at this speed; the plan counts 10 s for a stop"
        )

    def test_the_bad_machine_is_named_with_its_interface(self):
        found = verdicts(measured(links=links(range(3), of_end(1, range(3), 0.9 * GB))))
        verdict = found["rehearsal-links"]
        assert verdict.status == "fail"
        assert "node gpu01 (eth0) sends 900 MB/s, the median is 10 GB/s" in verdict.message
        assert "gpu00" not in verdict.message

    def test_machines_of_one_name_are_told_apart(self):
        ranks = [rank(n, host="localhost", node=n) for n in range(3)]
        slow = links(range(3), of_end(1, range(3), 0.9 * GB))
        assert (
            "localhost [node 1] (eth0)"
            in verdicts(measured(ranks=ranks, links=slow))["rehearsal-links"].message
        )

    def test_ranks_of_one_machine(self):
        ranks = [rank(n) for n in range(3)]
        slow = links(range(3), of_end(1, range(3), 0.9 * GB))
        message = verdicts(measured(ranks=ranks, links=slow))["rehearsal-links"].message
        assert "rank 1 on gpu00 sends 900 MB/s" in message

    def test_ranks_of_one_cpu_have_no_link_that_could_be_slow(self):
        ranks = [rank(n) for n in range(3)]
        slow = links(range(3), of_end(1, range(3), 0.1 * GB))
        planned = Planned("accelerate", 3, on_cpu=True, gradient_bytes=1, stop_seconds=None)
        assert verdicts(measured(ranks=ranks, links=slow), planned)["rehearsal-links"].status == "ok"

    def test_different_versions(self):
        ranks = [rank(n, host=f"gpu0{n}", node=n, torch="2.12.1" if n == 2 else "2.13.0") for n in range(3)]
        message = verdicts(measured(ranks=ranks))["rehearsal-ranks"].message
        assert "torch 2.13.0 on gpu00, gpu01, 2.12.1 on gpu02" in message

    def test_a_machine_that_meets_on_loopback(self):
        ranks = [rank(n, host=f"gpu0{n}", node=n, interface="lo" if n == 1 else "eth0") for n in range(3)]
        found = verdicts({"ranks": ranks, "backend": "gloo"})["rehearsal-interfaces"]
        assert found.status == "fail"
        assert found.message.startswith("gpu01:")
        assert "GLOO_SOCKET_IFNAME" in found.hint
        met = measured(ranks=ranks, backend="gloo")
        assert verdicts(met)["rehearsal-interfaces"].status == "ok", (
            "they joined: it is one machine after all"
        )

    def test_a_machine_without_infiniband(self):
        ranks = [rank(n, host=f"gpu0{n}", node=n, infiniband=[] if n == 2 else ["mlx5_0"]) for n in range(3)]
        assert "gpu02" in verdicts(measured(ranks=ranks))["rehearsal-interfaces"].message

    def test_a_wrong_sum(self):
        rows = measured()["all_reduce"]
        rows[1]["right"] = False
        assert bad(measured(all_reduce=rows)) == {"rehearsal-all-reduce"}

    def test_a_size_that_was_cut(self):
        rows = measured()["all_reduce"]
        rows[1]["asked_bytes"] = 4 * 10**8
        assert "400 MB" in verdicts(measured(all_reduce=rows))["rehearsal-all-reduce"].message

    def test_a_throttled_card_is_named_with_its_host(self):
        rows = [{**one, "device": "cuda:0", "flops": one["best_flops"]} for one in devices([250, 250, 100])]
        verdict = verdicts(measured(devices=rows))["rehearsal-devices"]
        assert verdict.status == "fail"
        assert "rank 2 on gpu02 (cuda:0, NVIDIA A100) computes 100 TFLOP/s" in verdict.message

    def test_a_run_directory_that_one_machine_does_not_share(self):
        ranks = [rank(n, host=f"gpu0{n}", node=n) for n in range(3)]
        ranks[2]["filesystem"] = "tmpfs none"
        saves = [written(0, unseen=[2]), written(1, unseen=[2]), written(2, unseen=[0, 1])]
        verdict = verdicts(measured(ranks=ranks, save=saves))["rehearsal-shared"]
        assert verdict.status == "fail"
        assert verdict.message.startswith("node gpu02 (eth0) does not share the run directory")
        assert "tmpfs none" in verdict.message

    def test_two_machines_that_share_nothing(self):
        saves = [written(0, unseen=[1]), written(1, unseen=[0])]
        verdict = verdicts(measured(2, save=saves))["rehearsal-shared"]
        assert verdict.status == "fail"
        assert "gpu00" in verdict.message
        assert "gpu01" in verdict.message

    def test_old_data(self):
        saves = [written(0), written(1), written(2, read={"rank": 0, "right": False, "error": None})]
        verdict = verdicts(measured(save=saves))["rehearsal-shared"]
        assert verdict.message == "rank 2 on gpu02 reads other bytes than rank 0 on gpu00 wrote"

    def test_a_rank_that_cannot_save(self):
        saves = [written(0), written(1), {**written(2), "error": "No space left on device (/runs/x)"}]
        verdict = verdicts(measured(save=saves))["rehearsal-save"]
        assert verdict.status == "fail"
        assert verdict.message == "rank 2 on gpu02: No space left on device (/runs/x)"

    def test_a_machine_that_saves_slowly(self):
        saves = [written(0), written(1, seconds=10.0), written(2)]
        found = verdicts(measured(save=saves))
        assert "node gpu01 (eth0) writes 100 MB/s, the median is 1 GB/s" in found["rehearsal-save"].message
        assert found["rehearsal-stop"].status == "warn", "22 s of it, and the plan counts 10"

    def test_small_shares_say_nothing_of_speed(self):
        saves = [written(n, size=65536, seconds=10.0 if n == 1 else 0.01, full=0) for n in range(3)]
        found = verdicts(measured(save=saves))
        assert found["rehearsal-save"].status == "ok"
        assert "rehearsal-stop" not in found

    def test_one_process(self):
        one = {"ranks": [rank(0)], "devices": measured(1)["devices"], "save": [written(0)]}
        found = verdicts(one, Planned("python", 1, on_cpu=True, gradient_bytes=1, stop_seconds=3.0))
        assert found["rehearsal-all-reduce"].status == "skip"
        assert "one process" in found["rehearsal-all-reduce"].message
        assert "rehearsal-links" not in found

    def test_what_ended_it_comes_first(self):
        problem = Problem("rehearsal-rank-missing", "rank 2 on gpu02 did not come", hint="look there")
        found = judge({}, PLANNED, [problem])
        assert [finding.id for finding in found] == ["rehearsal-start"]
        assert (found[0].verdict.status, found[0].verdict.message) == ("fail", problem.message)

    def test_it_is_json(self):
        rows = [finding.to_json() for finding in judge(measured(), PLANNED)]
        assert json.loads(json.dumps(rows)) == rows


class TestCourse:
    def test_what_is_measured_is_the_plans(self, tmp_path):
        found = plan(tmp_path, "8xA100-80GB")
        sizes = message_sizes(found)
        assert sizes[0] == SMALL
        assert max(bucket_bytes(found), SMALL) in sizes
        assert sizes[-1] >= LARGE
        course = plan_rehearsal(found, 20.0)
        assert rehearsal_of(json.loads(json.dumps(course.to_json()))) == course
        assert course.limit_s(8) > course.limit_s(1) > 20

    def test_what_ranks_save_adds_up_to_the_checkpoint(self, tmp_path):
        from launcher.knowledge.doctor.needs import checkpoint_bytes

        for engine in ("ddp", "deepspeed"):
            found = plan(tmp_path, "8xA100-80GB", sharding={"engine": engine})
            course = plan_rehearsal(found, 20.0)
            total = course.first_bytes + 7 * course.each_bytes
            assert total == pytest.approx(checkpoint_bytes(found), abs=16)

    @pytest.mark.parametrize("seconds", [0, -1, 0.5, 1e9, float("nan")])
    def test_seconds_that_measure_nothing(self, tmp_path, seconds):
        with pytest.raises(RecipeError, match="--seconds"):
            plan_rehearsal(plan(tmp_path, "8xA100-80GB"), seconds)


KNOWN = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "172.17.0.1": "docker0", "10.1.0.5": "ib0", "::1": "lo"}


@pytest.mark.parametrize(
    ("backend", "environ", "own", "interface"),
    [
        ("gloo", {}, "10.0.0.5", "eth0"),
        ("gloo", {}, "127.0.1.1", "lo"),
        ("gloo", {}, "10.9.9.9", "unknown"),
        ("gloo", {}, None, "unknown"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.5", "ib0"),
        ("nccl", {}, None, "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "eth"}, None, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=eth0"}, None, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^lo,docker"}, None, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=eth9"}, None, "=eth9"),
    ],
)
def test_the_interface_of_a_process_group(backend, environ, own, interface):
    assert choose_interface(backend, environ, KNOWN, own).interface == interface


@pytest.mark.parametrize(
    ("layout", "ends"),
    [([0, 0, 1, 1, 2, 2], [0, 2, 4]), ([0, 0, 0], [0, 1, 2]), ([0, 1], [0, 1])],
)
def test_the_ends_of_links(layout, ends):
    ranks = [rank(number, node=node, host=f"h{node}") for number, node in enumerate(layout)]
    assert ends_of(ranks) == ends


PINNED = {"sharding__engine": "deepspeed", "trainer__per_device_train_batch_size": 1}


class TestRanksThatShareACopy:
    """A rank of a tensor-parallel group reduces and saves its own part alone."""

    TEXT = (
        "model: {name_or_path: meta-llama/Llama-3.1-8B}\n"
        "data: {train: [{path: data/train.jsonl}], max_length: 512}\ntrainer: {max_steps: 10}\n"
    )

    def course(self, folder, on="8xB200", **said):
        return plan_rehearsal(plan(folder, on, self.TEXT, **PINNED, sharding__zero_stage=1, **said), 20.0)

    def test_gradients_and_states_are_of_a_rank_s_own_matrices(self, tmp_path):
        whole, part = self.course(tmp_path), self.course(tmp_path, sharding__tp_size=2)
        assert part.gradient_bytes == pytest.approx(whole.gradient_bytes / 2, rel=0.07)
        # As many bytes of all states on each rank, but for the embedding that is whole on both.
        assert part.each_bytes == pytest.approx(whole.each_bytes, rel=0.07)

    def test_one_copy_reduces_nothing(self, tmp_path):
        assert self.course(tmp_path, sharding__tp_size=8).gradient_bytes == 0

    def test_states_of_stage_0_are_a_part_too(self, tmp_path):
        said = {**PINNED, "sharding__zero_stage": 0, "precision": "fp32"}
        whole, part = (
            plan_rehearsal(plan(tmp_path, "8xB200", self.TEXT, **said, **more), 20.0).first_bytes
            for more in ({}, {"sharding__tp_size": 2})
        )
        matrices = 8.03e9 - 128256 * 4096  # the embedding and its states are whole on both ranks
        assert whole - part == pytest.approx(8 * matrices / 2, rel=0.01)
