import type { CheckedRequest, CheckedRun } from "./check-run.js";

/** The settings of a run, as `--json` prints them. */
export interface RunFacts {
  readonly front: string;
  readonly transport: string;
  readonly backend: string;
  readonly connector: string;
  readonly prefill_tp: number;
  readonly decode_tp: number;
  readonly prefill_platform: string;
  readonly decode_platform: string;
}

/** The output of `--json`. */
export function jsonReport({ ok, requests, warm }: CheckedRun, facts: RunFacts): object {
  return {
    ok,
    ...facts,
    requests: requests.map(jsonRequest),
    warm_requests: warm.map(jsonRequest),
  };
}

function jsonRequest(request: CheckedRequest): object {
  return {
    prompt_tokens: request.promptTokens,
    output_tokens: request.outputTokens,
    ttft_ms: round(request.ttftMs),
    queue_ms: round(request.queueMs),
    prefill_ms: round(request.prefillMs),
    save_ms: round(request.saveMs),
    connect_ms: round(request.connectMs),
    transfer_ms: round(request.transferMs),
    load_ms: round(request.loadMs),
    first_token_ms: round(request.firstTokenMs),
    other_ms: round(request.otherMs),
    decode_ms: round(request.decodeMs),
    total_ms: round(request.totalMs),
    transfer_bytes: request.transferBytes,
    tokens_equal: request.tokensEqual,
  };
}

/** The output as a table of 100 columns at most. `jsonReport` has more. */
export function tableReport(run: CheckedRun, facts: RunFacts): string {
  const header = [
    "prompt",
    "TTFT",
    "queue",
    "prefill",
    "save",
    "connect",
    "transfer",
    "load",
    "first",
    "other",
    "decode",
    "bytes",
    "KV",
    "tokens",
  ];
  const rowOf = (request: CheckedRequest) => [
    String(request.promptTokens),
    request.ttftMs.toFixed(1),
    request.queueMs.toFixed(1),
    request.prefillMs.toFixed(1),
    request.saveMs.toFixed(1),
    request.connectMs.toFixed(1),
    request.transferMs.toFixed(2),
    request.loadMs.toFixed(1),
    request.firstTokenMs.toFixed(1),
    request.otherMs.toFixed(1),
    request.decodeMs.toFixed(1),
    request.transferBytes.toLocaleString("en"),
    equality(request.kvEqual),
    equality(request.tokensEqual),
  ];
  const rows = run.requests.map(rowOf);
  const warmRows = run.warm.map(rowOf);
  const widths = header.map((title, i) =>
    Math.max(title.length, ...[...rows, ...warmRows].map((row) => row[i]?.length ?? 0)),
  );
  const line = (cells: readonly string[]) =>
    cells.map((cell, i) => cell.padStart(widths[i] ?? 0)).join(" ");
  const { control } = run;
  const all = [...run.requests, ...run.warm];
  const verdict = [
    `negative control: a zeroed block ${control.changed ? "changed" : "DID NOT CHANGE"} the tokens; without damage they are ${equality(control.restored)}`,
    run.ok
      ? `all ${all.length} requests have the tokens of a run in one process, and the KV that was sent`
      : "NOT all requests have the tokens of a run in one process",
  ];
  const problems = all.flatMap(({ problem }, i) =>
    problem === undefined ? [] : [`request ${i}: ${problem}`],
  );
  const units = `prompts in tokens, times in ms: TTFT is the sum of queue to other; backend ${facts.backend}`;
  const first = "first contact: connect contains the handshake, the plan and the prepared lists";
  const second = "second round, other prompts: connections and plans are there";
  return [
    units,
    "",
    first,
    line(header),
    ...rows.map(line),
    "",
    second,
    ...warmRows.map(line),
    "",
    ...problems,
    ...verdict,
    "",
  ].join("\n");
}

function equality(equal: boolean): string {
  return equal ? "equal" : "DIFFERENT";
}

function round(ms: number): number {
  return Math.round(ms * 1000) / 1000;
}
