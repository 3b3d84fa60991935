import type { CheckedRun } from "./check-run.js";

/** The settings of a run. */
export interface RunFacts {
  readonly transport: string;
  readonly backend: string;
  readonly connector: string;
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly prefillPlatform: string;
  readonly decodePlatform: string;
}

/** The output of `--json`. */
export function jsonReport({ ok, requests }: CheckedRun, facts: RunFacts): object {
  return {
    ok,
    transport: facts.transport,
    backend: facts.backend,
    connector: facts.connector,
    prefill_tp: facts.prefillTp,
    decode_tp: facts.decodeTp,
    prefill_platform: facts.prefillPlatform,
    decode_platform: facts.decodePlatform,
    requests: requests.map((request) => ({
      prompt_tokens: request.promptTokens,
      output_tokens: request.outputTokens,
      ttft_ms: round(request.ttftMs),
      prefill_ms: round(request.prefillMs),
      save_ms: round(request.saveMs),
      transfer_ms: round(request.transferMs),
      load_ms: round(request.loadMs),
      decode_ms: round(request.decodeMs),
      total_ms: round(request.totalMs),
      transfer_bytes: request.transferBytes,
      tokens_equal: request.tokensEqual,
    })),
  };
}

/** The output as a table. */
export function tableReport(run: CheckedRun, facts: RunFacts): string {
  const header = [
    "prompt tokens",
    "TTFT ms",
    "prefill ms",
    "save ms",
    "transfer ms",
    "load ms",
    "decode ms",
    "total ms",
    "bytes",
    "GB/s",
    "backend",
    "KV",
    "tokens",
  ];
  const rows = run.requests.map((request) => [
    String(request.promptTokens),
    request.ttftMs.toFixed(1),
    request.prefillMs.toFixed(1),
    request.saveMs.toFixed(2),
    request.transferMs.toFixed(2),
    request.loadMs.toFixed(2),
    request.decodeMs.toFixed(1),
    request.totalMs.toFixed(1),
    request.transferBytes.toLocaleString("en"),
    gigabytesPerSecond(request.transferBytes, request.transferMs),
    facts.backend,
    equality(request.kvEqual),
    equality(request.tokensEqual),
  ]);
  const widths = header.map((title, i) => Math.max(title.length, ...rows.map((row) => row[i]?.length ?? 0)));
  const line = (cells: readonly string[]) => cells.map((cell, i) => cell.padStart(widths[i] ?? 0)).join("  ");
  const { control } = run;
  const verdict = [
    `negative control: a zeroed block ${control.changed ? "changed" : "DID NOT CHANGE"} the tokens; without damage they are ${equality(control.restored)}`,
    run.ok
      ? `all ${run.requests.length} requests have the tokens of a run in one process, and the KV that was sent`
      : "NOT all requests have the tokens of a run in one process",
  ];
  const problems = run.requests.flatMap(({ problem }, i) =>
    problem === undefined ? [] : [`request ${i}: ${problem}`],
  );
  return [line(header), ...rows.map(line), "", ...problems, ...verdict, ""].join("\n");
}

function equality(equal: boolean): string {
  return equal ? "equal" : "DIFFERENT";
}

function gigabytesPerSecond(bytes: number, ms: number): string {
  return ms > 0 ? (bytes / ms / 1e6).toFixed(2) : "-";
}

function round(ms: number): number {
  return Math.round(ms * 1000) / 1000;
}
