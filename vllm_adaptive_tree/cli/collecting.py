"""Collect training examples: decode prompts with an engine that records its verified trees, in parts on disk."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.bench.environment import TARGET, check_available, set_environment, shown
from vllm_adaptive_tree.bench.prompts import PROMPTS
from vllm_adaptive_tree.cli.arguments import add_pair, check_lengths, new_file, positive, prompts_file
from vllm_adaptive_tree.gates.parts import Collected, Parts, checksum

SAVE_EVERY = 30.0  # seconds; a killed run loses at most these


class Job(NamedTuple):
    """Examples to collect: of one kind, from trees of one method."""

    kind: str  # of `gates.examples.EXAMPLE_BUILDERS`
    examples: Mapping[str, Any]  # options of that kind
    speculation: Mapping[str, Any]  # method, nodes, rule and tree
    prompts: tuple[str, ...]
    options: argparse.Namespace  # of the command line

    @property
    def parts(self) -> Path:
        out: Path = self.options.out
        return out.with_name(out.name + ".parts")

    def arguments(self) -> dict[str, Any]:
        """Arguments that the examples depend on."""
        return {
            "kind": self.kind,
            **self.examples,
            **self.speculation,
            "model": shown(self.options.model),
            "draft": shown(self.options.draft),
            "prompts": f"{len(self.prompts)} ({checksum(self.prompts)})",
            "temperatures": self.options.temperature,
            **{name: getattr(self.options, name) for name in ("max_tokens", "max_model_len", "dtype")},
        }


def add_arguments(parser: argparse.ArgumentParser, *, what: str) -> None:
    parser.add_argument("--out", type=new_file, required=True, metavar="FILE", help=f"{what}; FILE.parts: the examples")
    add_pair(parser)
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        default=PROMPTS,
        metavar="FILE",
        help="one prompt per line, or blocks separated by lines of three dashes, as the target shall read them (a chat "
        "model: with its template); of prompts too long, the end (default: the eight of the demo)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="new tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="of the requests, 0: greedy; the prompts take several in turn (default: 0)",
    )
    parser.add_argument("--batch", type=positive, default=8, help="prompts decoded at a time (default: %(default)s)")
    parser.add_argument("--max-model-len", type=positive, default=1024, help="longest text (default: %(default)s)")


def job_of(
    options: argparse.Namespace,
    kind: str,
    examples: Mapping[str, Any],
    method: str,
    nodes: int,
    tree: Mapping[str, Any],
    prompts: tuple[str, ...] | None = None,
    rule: str = "auto",
) -> Job:
    """Job of a command line, with trees of `method`; `examples`: options of this `kind` of examples."""
    check_lengths(options)
    whole = {"budget": None, **tree}  # the trees must not depend on what they cost on this machine
    speculation = {"method": method, "num_speculative_tokens": nodes, "rejection_sample_method": rule, "tree": whole}
    return Job(kind, examples, speculation, options.prompts if prompts is None else prompts, options)


def resumable(options: argparse.Namespace, work: Callable[[], None]) -> int:
    """Run `work`, which collects examples; returns the exit code of the command."""
    try:
        work()
    except KeyboardInterrupt:
        print("\ninterrupted: what was collected is kept; the same command goes on there", file=sys.stderr)
        return 130
    return 0


def collect(job: Job) -> Collected:
    """Collect the examples of `job`: those on disk, and those of the prompts that are not finished there.

    Raises:
        ValueError: the parts on disk are another job's, or unreadable; a model cannot be had.
        KeyboardInterrupt: the collected examples are on disk.
    """
    set_environment(job.options.model, job.options.draft)
    check_available(job.options.model, job.options.draft)
    parts = Parts.open(job.parts, job.arguments())
    progress = dict(parts.progress())
    if any(progress.get(str(number), ()) is not None for number in range(len(job.prompts))):
        _decode(job, parts, progress)
    return parts.load()


def _decode(job: Job, parts: Parts, progress: dict[str, list[int] | None]) -> None:
    options = job.options
    print("an engine starts ...", file=sys.stderr, flush=True)
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if options.model == TARGET:  # OMP_NUM_THREADS came too late for this process
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    nodes = job.speculation["num_speculative_tokens"]
    llm = LLM(
        options.model,
        speculative_config={**job.speculation, "model": options.draft},
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.max_model_len,
        max_num_seqs=options.batch,
        max_num_batched_tokens=max(options.max_model_len, (options.batch + 1) * (nodes + 2)),  # every tree in full
        enable_prefix_caching=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    llm.collective_rpc("record", args=(job.kind, dict(job.examples)))
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    for number, prompt in enumerate(job.prompts):
        tokens = progress.setdefault(str(number), [])
        if tokens is not None:
            text = tokenizer.encode(prompt)[-(options.max_model_len - options.max_tokens) :]
            params = SamplingParams(
                temperature=options.temperature[number % len(options.temperature)],
                max_tokens=options.max_tokens - len(tokens),
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            )
            engine.add_request(str(number), {"prompt_token_ids": text + tokens}, params)

    def save() -> int:
        return sum(llm.collective_rpc("save_recorded", args=(str(parts.next_file()), progress)))

    saved, trees = time.monotonic(), 0
    left = sum(options.max_tokens - len(tokens) for tokens in progress.values() if tokens is not None)
    with tqdm(total=left, desc="decoding", unit="tok", disable=None) as bar:
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens, new = progress[output.request_id], output.outputs[0].token_ids
                    assert tokens is not None
                    tokens += new
                    bar.update(options.max_tokens - len(tokens) + len(new) if output.finished else len(new))
                    if output.finished:
                        progress[output.request_id] = None
                if time.monotonic() - saved > SAVE_EVERY:
                    trees += save()
                    bar.set_postfix(trees=trees, saved=time.strftime("%H:%M:%S"))
                    saved = time.monotonic()
        finally:
            save()
            engine.engine_core.shutdown()


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature")
    return value
