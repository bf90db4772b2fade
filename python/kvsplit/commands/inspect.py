# SPDX-License-Identifier: MIT
"""``kvsplit inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional

import typer

from kvsplit import models, runs, terminal


def inspect(
    model: Optional[str] = typer.Argument(None, help="GGUF file or name of a pulled model."),
    model_opt: Optional[str] = typer.Option(None, "--model", "-m", help="The same as an option."),
    prompt: Optional[str] = typer.Option(
        None, "--prompt", "-p", help="Text that the model reads; its cache is looked at."
    ),
    text: Optional[Path] = typer.Option(
        None, "--text", help="UTF-8 file with that text. Default: what Python carries."
    ),
    ctx: Optional[int] = typer.Option(
        None, "--ctx", "-c", min=2, max=2**31 - 1, help="Tokens of the text at most. Default: 1024."
    ),
    config: Optional[List[str]] = typer.Option(
        None,
        "--config",
        help="What to look at: K8V4,K4V4 (keys and values at 4 bits) or, by ';', pairs of SPECs such as "
        "q8_0/kvq4,:2=q8_0. Default: K8V8,K8V4,K6V5,K6V3,K4V8,K4V4.",
    ),
    queries: int = typer.Option(
        64, "--queries", min=1, help="Positions of the text whose attention is compared with f16's."
    ),
    budget: float = typer.Option(
        10.0,
        "--budget",
        min=0.0,
        help="How much larger than the configuration's a recommended cache may be, in percent.",
    ),
    maps: bool = typer.Option(False, "--maps", help="Draw attention of the most, a middling and the least hurt layer."),
    layers: Optional[str] = typer.Option(
        None, "--layers", help="Layers to draw instead, as Python slices: 0,-2: is the first and the last two."
    ),
    heads: Optional[str] = typer.Option(
        None, "--heads", help="Query heads to draw, likewise. Default: the most hurt one."
    ),
    threads: Optional[int] = typer.Option(None, "--threads", "-t", min=1, help="Threads of the model."),
    out: Path = typer.Option(Path("kvsplit-results"), "--out", help="Folder for the files; nothing is overwritten."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout instead of the table."),
) -> None:
    """Look inside the cache of one prompt: error of each layer, which to protect, and what to beware of."""
    from kvsplit import inspect as ins
    from kvsplit.bench import parse_configs

    path = models.resolve(terminal.which_model(model, model_opt))
    options = ins.Options(
        configs=parse_configs(config or [",".join(ins.DEFAULT_CONFIGS)]),
        prompt=prompt,
        text=text,
        n_ctx=ctx,
        queries=queries,
        budget=budget,
        maps=maps,
        layers=layers,
        heads=heads,
        n_threads=threads,
        out=out,
    )
    with runs.Progress() as progress:
        res = ins.run(path, options, command=runs.command_line(), step=progress.step)
    for f in res.files:
        typer.echo(f"wrote {f}", err=True)
    if as_json:
        terminal.out_json(res.to_json())
    else:
        show(res)


def _remarks(res: Any, x: Any) -> str:
    """What is special about a layer, in a few words."""
    said = {w.kind for w in res.cautions if x.layer in w.layers}
    out: List[str] = []
    if x.swa:
        out.append("window")
    if "key_bias" in said:
        out.append(f"key bias {x.key_bias:.3g}")
    elif "constant_keys" in said:
        out.append(f"{100 * max(x.constant_keys):.0f} % of keys constant")
    if "first_token" in said:
        out.append(f"{100 * x.first:.0f} % on first token")
    n = sum(len(s.outlier_channels) for s in x.keys)
    if n:
        out.append(f"{n} outlier channel{'s'[: n != 1]}")
    return ", ".join(out)


def show(res: Any) -> None:
    """Print an inspection on stdout."""
    console = terminal.console()
    tk = next(iter(res.key_types()), None)
    tv = next(iter(res.value_types()), None)
    console.print(
        f"{res.model}: {res.n_tokens} tokens of {res.text}, {len(res.layers)} layers, {res.n_queries} queries",
        soft_wrap=True,
    )
    columns = [("layer", "right")]
    columns += [(f"K error\n{tk}", "right"), (f"logits\n{tk}", "right"), ("rank\nK", "right")] if tk else []
    columns += [(f"V error\n{tv}", "right"), ("rank\nV", "right")] if tv else []
    columns += [(f"output\n{q.label}", "right") for q in res.configs]
    t = terminal.table(*columns, ("remark", "left"))
    rank_k = {layer: i for i, layer in enumerate(res.damaged_by_keys(tk), 1)} if tk else {}
    rank_v = {layer: i for i, layer in enumerate(res.damaged_by_values(tv), 1)} if tv else {}
    errors = [res.output_nse(q) for q in res.configs]
    for x in res.layers:
        cells = [str(x.layer)]
        if tk:
            cells += [f"{x.damage.keys[tk].nse:.5f}", f"{x.logit_rmse(tk):.3f}", str(rank_k[x.layer])]
        if tv:
            cells += [f"{x.damage.values[tv].nse:.5f}", str(rank_v[x.layer])]
        cells += [f"{e[x.layer]:.1e}" for e in errors]
        t.add_row(*cells, _remarks(res, x))
    means = [f"{sum(e) / len(e):.1e}" for e in errors]
    t.add_row("mean", *[""] * ((3 if tk else 0) + (2 if tv else 0)), *means, "")
    terminal.show(console, t)
    tell = terminal.out
    for a in res.advice:
        grown = 100 * (a.bytes_after / a.bytes_before - 1)
        less = 100 * (1 - a.error_after / a.error_before) if a.error_before else 0.0
        tell(f"{a.config}: protect with --kvq-key {a.key} --kvq-val {a.val}")
        tell(
            f"  {a.bytes_before / 2**20:.2f} -> {a.bytes_after / 2**20:.2f} MiB at {a.n_ctx} tokens (+{grown:.1f} %), "
            f"output error {a.error_before:.1e} -> {a.error_after:.1e} ({less:.0f} % less)"
        )
    for w in res.cautions:
        tell(f"{w.kind.replace('_', ' ')}: {w.text}")
    typer.echo(
        "errors are squared and relative to f16, one layer at a time; rank 1 is hurt most by that side alone; "
        "logits in nats",
        err=True,
    )
