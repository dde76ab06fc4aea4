"""The example: its parts in one process, and a small run of the whole job under torchrun."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus
import plots
import progress
import train_largest
from corpus import BatchPlan
from curve import Curve, HeldOutRecord, StepRecord, memory_in_use
from gpt import GPT, GPTConfig
from plots import draw_curves, smooth
from progress import Progress
from settings import Settings, parse_settings
from tests.processes import ROOT, printed, start, torchrun

TINY = GPTConfig(vocab_size=256, sequence_length=16, num_layers=2, width=24, num_heads=3)
TEXT = torch.arange(1000).remainder(251).to(torch.uint8)


def tiny_gpt(config: GPTConfig = TINY) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def global_batch(plan: BatchPlan, step: int) -> list[list[int]]:
    """All sequences of a step, in order of microbatch and rank."""
    return [
        row
        for microbatch in range(plan.num_microbatches)
        for rank in range(plan.num_ranks)
        for row in plan.train_batch(TEXT, step, microbatch, rank).tokens.tolist()
    ]


# No deadline: on a busy machine the time of one example says nothing.
@settings(deadline=None, max_examples=30)
@given(
    step=st.integers(0, 10**6),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    num_microbatches=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 100),
)
def test_any_number_of_ranks_and_microbatches_sees_the_same_global_batch(
    step: int, num_ranks: int, num_microbatches: int, seed: int
) -> None:
    whole = BatchPlan(72, 1, 1, 8, seed)
    cut = BatchPlan(72 // num_microbatches, num_microbatches, num_ranks, 8, seed)
    assert global_batch(cut, step) == global_batch(whole, step)


def test_a_step_gives_the_same_sequences_whatever_came_before_it() -> None:
    plan = BatchPlan(4, 1, 2, 8)
    fresh = global_batch(plan, 7)
    torch.manual_seed(99)
    assert global_batch(plan, 3) != fresh
    assert global_batch(BatchPlan(4, 1, 2, 8, seed=1), 7) != fresh
    assert global_batch(plan, 7) == fresh


def test_targets_are_the_next_bytes() -> None:
    batch = corpus.gather_sequences(TEXT, [3, 100], sequence_length=4)
    assert batch.tokens.tolist() == [[3, 4, 5, 6], [100, 101, 102, 103]]
    assert batch.targets.tolist() == [[4, 5, 6, 7], [101, 102, 103, 104]]
    # The last possible start still has a last target.
    starts = corpus.batch_starts(num_bytes=10, sequence_length=9, count=50, step=0, seed=0)
    assert set(starts) == {0}
    assert corpus.gather_sequences(TEXT[:10], starts, 9).targets[0, -1] == TEXT[9]


def test_held_out_sequences_are_spread_and_shared_by_ranks_without_overlap() -> None:
    plan = BatchPlan(4, 1, 2, 8)
    starts = plan.held_out_starts(TEXT, num_batches=3)
    assert len(set(starts)) == 12
    assert starts[0] == 0
    assert starts[-1] > 0.9 * (TEXT.numel() - 8) - 1
    parts = [plan.held_out_batch(TEXT, 3, i, rank).tokens for i in range(3) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), corpus.gather_sequences(TEXT, starts, 8).tokens)


def test_the_side_of_a_file_does_not_depend_on_the_others() -> None:
    names = [f"package/module_{i}.py" for i in range(300)]
    held_out = corpus.split_by_file(names)
    assert 10 < len(held_out) < 60
    assert corpus.split_by_file(names[100:]) == held_out & set(names[100:])
    assert corpus.split_by_file(names[::-1]) == held_out
    # The same on every machine: blake2b with 7 bytes, of b"os.py", as a fraction of 2**56.
    assert corpus.hash_fraction("os.py") == pytest.approx(0.12486373838868839, abs=1e-12)


def test_generated_text_has_no_control_characters() -> None:
    assert (
        corpus.printable(b"a\tb\n\x1b[2J\x00\xff\xc3\xa9") == "a\ufffdb\n\ufffd[2J\ufffd\ufffd\xe9"
    )


@settings(deadline=None, max_examples=30)
@given(st.sets(st.text("ab/._ä", min_size=1, max_size=5), min_size=2, max_size=8), st.floats(0, 1))
def test_neither_side_of_a_split_is_ever_empty(names: set[str], fraction: float) -> None:
    assert 0 < len(corpus.split_by_file(sorted(names), fraction)) < len(names)


def test_each_text_file_but_tests_and_packages_is_wholly_on_one_side(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    left_out = ("tests/1.txt", "site-packages/2.txt", "deep/test/3.txt")
    for name in (*(f"sub/{letter}.txt" for letter in letters), *left_out):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem * 10)
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\1")
    text = corpus.read_corpus(tmp_path)
    sides = [bytes(side.tolist()) for side in (text.train, text.held_out)]
    for byte in letters.encode():
        assert sorted(side.count(byte) for side in sides) == [0, 10]
    assert len(b"".join(sides).replace(b"\n", b"")) == 10 * len(letters)
    assert text.num_train_files + text.num_held_out_files == len(letters)
    assert text.num_held_out_files >= 1
    default = {path.name for path in corpus.text_files(corpus.standard_library(), "*.py")}
    assert {"os.py", "argparse.py"} <= default


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: BatchPlan(16, 1, 3, 8), "batch_size: expected a multiple of the 3 ranks"),
    (
        lambda: BatchPlan(1, 1, 1, 8).train_batch(TEXT[:8], 0, 0, 0),
        "sequence_length: expected less than",
    ),
    (
        lambda: BatchPlan(1, 1, 1, 8).held_out_starts(TEXT[:8], 1),
        "sequence_length: expected less than",
    ),
    (lambda: corpus.split_by_file(["only.txt"]), "at least 2 text files; found 1"),
    (lambda: corpus.read_corpus(Path("nowhere")), "data: expected a folder"),
    (
        lambda: tiny_gpt()(torch.zeros(1, 17, dtype=torch.int64)),
        "tokens: expected at most 16 a sequence; found 17",
    ),
    (lambda: dataclasses.replace(TINY, width=25), "width: expected a multiple of num_heads=3"),
    *(
        (lambda mesh=mesh: Settings(mesh=mesh), "mesh: expected like")
        for mesh in ("0", "2x", "2x2x2", "two", "-1")
    ),
]


def test_wrong_arguments_are_refused() -> None:
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_bigram_of_a_tiny_text_is_that_computed_by_hand() -> None:
    # "abaab" has the pairs ab, ba, aa, ab: after "a" two b and one a, after "b" one a.
    train = torch.tensor(list(b"abaab"), dtype=torch.uint8)
    tokens, targets = torch.tensor([list(b"aab")]), torch.tensor([list(b"baa")])
    # b after a, a after a, a after b
    chances = [(2 + 1) / (3 + 256), (1 + 1) / (3 + 256), (1 + 1) / (1 + 256)]
    found = corpus.bigram_cross_entropy(train, tokens, targets)
    assert found == pytest.approx(-sum(map(math.log, chances)) / 3, rel=1e-12)
    # Bytes never seen cost as much as a uniform guess.
    unseen = torch.tensor([[0, 1, 2]])
    found = corpus.bigram_cross_entropy(train, unseen, unseen + 7)
    assert found == pytest.approx(math.log(256))


def test_an_untrained_model_guesses_about_uniformly_and_sees_no_later_position() -> None:
    model, tokens = tiny_gpt(), torch.randint(256, (8, 16))
    assert model(tokens).loss is None
    out = model(tokens, torch.randint(256, (8, 16)))
    assert out.logits.shape == (8, 16, 256)
    assert out.loss.shape == ()
    assert float(out.loss.detach()) == pytest.approx(math.log(256), abs=0.2)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    after = model(changed).logits
    torch.testing.assert_close(out.logits[:, :9], after[:, :9])
    assert not torch.allclose(out.logits[:, 9:], after[:, 9:])


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_activation_checkpointing_changes_no_gradient(kind: str) -> None:
    tokens = torch.randint(256, (2, 16))
    plain, recomputing = tiny_gpt(), tiny_gpt(dataclasses.replace(TINY, checkpointing=kind))
    for model in (plain, recomputing):
        model(tokens, tokens).loss.backward()
    for (name, p), q in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_model_on_the_meta_device_can_be_given_its_values_module_by_module() -> None:
    with torch.device("meta"):
        model = GPT(TINY)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    torch.manual_seed(0)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            module.to_empty(device="cpu", recurse=False)
            for p in module.parameters(recurse=False):
                torch.nn.init.constant_(p, math.nan)
            module.reset_parameters()  # type: ignore[operator]
    for (name, p), q in zip(model.named_parameters(), tiny_gpt().parameters(), strict=True):
        assert torch.isfinite(p).all(), name
        found, expected = (float(each.detach().std()) for each in (p, q))
        assert found == pytest.approx(expected, rel=0.25, abs=1e-6), name


def test_generation_adds_the_tokens_asked_for_and_repeats_with_its_seed() -> None:
    model, prompt = tiny_gpt(), torch.randint(256, (5,))

    def generate(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, num_tokens=20, generator=generator)

    text = generate(1)
    assert text.shape == (25,)
    assert torch.equal(text[:5], prompt)
    assert torch.equal(generate(1), text)
    assert not torch.equal(generate(2), text)
    # At a temperature of almost 0 each token has the largest logit, inside and beyond the window.
    text = model.generate(prompt, num_tokens=17, temperature=1e-6)
    for end in range(5, 22):
        window = text[max(0, end - TINY.sequence_length) : end]
        assert int(model(window[None]).logits[0, -1].argmax()) == int(text[end])


def test_curves_are_drawn_with_room_above_a_level_line_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [StepRecord(i + 1, 5.0 / (i + 1), 1.0, 1e-3, 1e4, (100 + i) * 2**20) for i in range(20)]
    curve = Curve(steps, [HeldOutRecord(0, 5.5), HeldOutRecord(20, 1.0)])
    monkeypatch.setattr(plots.pyplot, "close", lambda figure: None)
    path = tmp_path / "new" / "curves.png"
    draw_curves(path, curve, bigram=2.4, title="a run")
    below = plots.pyplot.gcf().axes[1]
    monkeypatch.undo()
    plots.pyplot.close()
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000
    assert below.get_ylim()[0] == 0
    assert below.get_ylim()[1] > 1.1 * 119
    again = Curve()
    again.load_state_dict(curve.state_dict())
    assert again == curve
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)
    assert smooth([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 0.5 / 0.75])


def test_memory_in_use_counts_a_large_tensor() -> None:
    # A mapping has new pages. A tensor on the heap may reuse pages that are counted already.
    big = torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.uint8)
    before = memory_in_use(torch.device("cpu"))
    big.fill_(1)
    assert memory_in_use(torch.device("cpu")) - before > big.numel() // 2


def test_progress_is_a_bar_on_a_terminal_and_else_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, hidden = Progress(0, 40, shown=True), Progress(0, 40, shown=False)
    for step in range(10, 50, 10):
        for each in (shown, hidden):
            each.advance(step, f"loss {step}")
        now[0] += 3
    shown.say("held out")
    hidden.say("held out")
    shown.close()
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["step    30 of 40   loss 30", "held out"]
    assert captured.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = Progress(10, 40, shown=True)
    bar.advance(20, "loss 3")
    bar.close()
    captured = capsys.readouterr()
    assert "20/40" in captured.err
    assert "loss 3" in captured.err
    assert captured.out == ""


def test_settings_are_read_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--mesh 2x3 --lr 0.5 --steps 7 --no-sample --meta-init --data texts"
    found = parse_settings([*arguments.split(), "--outer-strategy", "optim"])
    given = {"mesh": "2x3", "lr": 0.5, "steps": 7, "sample": False, "meta_init": True}
    assert found == Settings(**given, data=Path("texts"), outer_strategy="optim")
    assert found.mesh_shape == (2, 3)
    assert parse_settings([]) == Settings()
    with pytest.raises(SystemExit):
        parse_settings(["--steps", "0"])
    assert "steps: expected at least 1; found 0" in capsys.readouterr().err
    assert Settings(steps=100, stop_at=40).last_step == 40
    assert Settings(steps=100, stop_at=400).last_step == 100


def test_the_width_of_the_largest_model_follows_the_memory() -> None:
    widths = [train_largest.width_for(memory << 20) for memory in (1, 200, 2000, 20000, 10**7)]
    assert widths == [64, 256, 512, 2048, 4096]
    for memory in (200, 2000, 20000):
        width = train_largest.width_for(memory << 20)
        four_blocks = 4 * 12 * width**2 * sum(train_largest.ROLE_BYTES.values())
        assert four_blocks <= (memory << 20) / 4 < 4 * four_blocks


def test_the_description_of_the_largest_model_has_the_bytes_of_each_role(tmp_path: Path) -> None:
    job = train_largest.Job(train_largest.config_of(64, 2, 16), tmp_path, 1)
    with torch.device("meta"):
        count = sum(param.numel() for param in GPT(job.config).parameters())
    text = train_largest.describe(job, memory=8 * count)
    assert f"GPT of {count:,} parameters: 2 blocks of width 64" in text
    assert "optimizer_state: 0.00 GiB on disk" in text
    assert "2.00 times the memory" in text
    offload, sizes = train_largest.offload(tmp_path), train_largest.ROLE_BYTES.items()
    on_disk = sum(size for role, size in sizes if getattr(offload, role) == "disk")
    assert train_largest.bytes_on_disk(count) == count * on_disk


def train_the_largest(texts: Path, folder: Path, *arguments: str, succeeds: bool = True) -> str:
    script = str(ROOT / "examples" / "train_largest.py")
    paths = ("--data", str(texts / "texts"), "--folder", str(folder))
    return printed(script, *paths, *arguments, succeeds=succeeds)


@pytest.mark.thorough
def test_a_model_with_more_bytes_than_the_memory_trains(texts: Path, tmp_path: Path) -> None:
    text = train_the_largest(texts, tmp_path, "--memory", "0.2", "--disk", "0.5")
    (times,) = re.findall(r"together [\d.]+ GiB, ([\d.]+) times the memory", text)
    assert float(times) > 1.5
    first, *_, last = map(float, re.findall(r"loss ([\d.]+)", text))
    assert last < first - 0.5
    (peak,) = re.findall(r"at most ([\d.]+) GiB in memory, of 0.200", text)
    assert float(peak) < 0.2
    text = train_the_largest(texts, tmp_path, "--memory", "0.001", succeeds=False)
    assert re.search(r"--memory: expected at least \d+ bytes in memory", text)


def command_of(folder: Path, out: str, num_ranks: int, *arguments: str) -> list[str]:
    """The job under torchrun on the texts in ``folder``."""
    return [
        *(*torchrun(num_ranks), str(ROOT / "examples" / "train_gpt.py")),
        *("--data", str(folder / "texts"), "--out", str(folder / out)),
        *("--steps", "6", "--warmup", "2", "--layers", "2", "--width", "32"),
        *("--sequence-length", "32", "--batch-size", "4", "--eval-sequences", "8"),
        *("--eval-every", "3", "--sample-bytes", "5", *arguments),
    ]


def train(folder: Path, out: str, num_ranks: int, *arguments: str) -> dict[str, Any]:
    """Runs the job to its end; returns its metrics, its ``losses``, and its output as
    ``printed``."""
    text = printed(*command_of(folder, out, num_ranks, *arguments))
    assert "bigram" in text
    measured = json.loads((folder / out / "metrics.json").read_text())
    assert (folder / out / "curves.png").exists()
    losses = [record["loss"] for record in measured["steps"]]
    return {**measured, "printed": text, "losses": losses}


@pytest.mark.thorough
def test_a_run_resumed_on_other_ranks_and_strategy_continues_the_same_curve(texts: Path) -> None:
    whole = train(texts, "whole", 2, "--grad-accumulation", "2", "--batch-size", "2")
    first = train(texts, "first", 2, "--stop-at", "3", "--no-sample")
    checkpoints = str(texts / "first" / "checkpoints")
    second = train(texts, "second", 1, "--resume", checkpoints, "--strategy", "no_shard")
    assert "resumed after step 3" in second["printed"]
    assert [record["step"] for record in second["steps"]] == [1, 2, 3, 4, 5, 6]
    losses = second["losses"]
    assert first["losses"] == losses[:3]
    assert losses[0] - losses[-1] > 0.1
    assert whole["losses"] == pytest.approx(losses, abs=1e-3)
    assert whole["bigram"] == second["bigram"]
    held_out = [[record["loss"] for record in run["held_out"]] for run in (whole, second)]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-3)


@pytest.mark.thorough
def test_matrices_may_travel_as_fp8(texts: Path) -> None:
    plain = train(texts, "plain", 2, "--dtype", "bf16", "--no-sample")
    assert "parameters: bf16\n" in plain["printed"]
    run = train(texts, "fp8", 2, "--dtype", "bf16", "--fp8-gather", "block", "--no-sample")
    assert "parameters: bf16, gathered as fp8 by block\n" in run["printed"]
    assert run["losses"][0] - run["losses"][-1] > 0.1
    assert run["losses"] != plain["losses"]
    assert run["losses"] == pytest.approx(plain["losses"], rel=0.02)


@pytest.mark.thorough
def test_a_killed_run_that_is_started_again_continues_by_itself(texts: Path) -> None:
    steps = ("--steps", "500", "--eval-every", "1000", "--no-sample", "--stop-at")
    saves = ("500", "--save-every", "2", "--async-save")
    process = start(*command_of(texts, "killed", 2, *steps, *saves))
    checkpoints = texts / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while not any(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank_0 = int((checkpoints / ".lock").read_text().split()[1])
    os.kill(rank_0, signal.SIGKILL)
    text, _ = process.communicate(timeout=300)  # torchrun ends the other rank
    assert process.returncode != 0, text
    last = max(int(path.name[5:13]) for path in checkpoints.glob("step-*"))

    stop_at = str(last + 5)
    again = train(texts, "killed", 2, *steps, stop_at)
    assert f"resumed after step {last} from" in again["printed"]
    assert again["losses"] == train(texts, "whole", 2, *steps, stop_at)["losses"]
    assert len(again["losses"]) == last + 5
