import type { CheckedRequest, CheckedRun } from "./check-run.js";

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

/** A time of a request: its column in the table, its name in JSON, and its decimals in the table. */
const TIMES = [
  ["TTFT", "ttft_ms", "ttftMs", 1],
  ["queue", "queue_ms", "queueMs", 1],
  ["prefill", "prefill_ms", "prefillMs", 1],
  ["save", "save_ms", "saveMs", 1],
  ["connect", "connect_ms", "connectMs", 1],
  ["transfer", "transfer_ms", "transferMs", 2],
  ["load", "load_ms", "loadMs", 1],
  ["first", "first_token_ms", "firstTokenMs", 1],
  ["other", "other_ms", "otherMs", 1],
  ["decode", "decode_ms", "decodeMs", 1],
] as const;

export function jsonReport({ ok, requests, warm }: CheckedRun, facts: RunFacts): object {
  const shown = requests.map(jsonRequest);
  return { ok, ...facts, requests: shown, warm_requests: warm.map(jsonRequest) };
}

function jsonRequest(request: CheckedRequest): object {
  const round = (ms: number) => Math.round(ms * 1000) / 1000;
  return {
    prompt_tokens: request.promptTokens,
    output_tokens: request.outputTokens,
    ...Object.fromEntries(TIMES.map(([, name, time]) => [name, round(request[time])])),
    total_ms: round(request.totalMs),
    transfer_bytes: request.transferBytes,
    tokens_equal: request.tokensEqual,
  };
}

const equality = (equal: boolean) => (equal ? "equal" : "DIFFERENT");

/** The output as a table of 100 columns at most. `jsonReport` has more. */
export function tableReport(run: CheckedRun, facts: RunFacts): string {
  const header = ["prompt", ...TIMES.map(([title]) => title), "bytes", "KV", "tokens"];
  const rowOf = (request: CheckedRequest) => [
    String(request.promptTokens),
    ...TIMES.map(([, , time, decimals]) => request[time].toFixed(decimals)),
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
  return [
    `prompts in tokens, times in ms: TTFT is the sum of queue to other; backend ${facts.backend}`,
    "",
    "first contact: connect contains the handshake, the plan and the prepared lists",
    line(header),
    ...rows.map(line),
    "",
    "second round, other prompts: connections and plans are there",
    ...warmRows.map(line),
    "",
    ...all.flatMap(({ problem }, i) => (problem === undefined ? [] : [`request ${i}: ${problem}`])),
    `negative control: a zeroed block ${control.changed ? "changed" : "DID NOT CHANGE"} the tokens; without damage they are ${equality(control.restored)}`,
    run.ok
      ? `all ${all.length} requests have the tokens of a run in one process, and the KV that was sent`
      : "NOT all requests have the tokens of a run in one process",
    "",
  ].join("\n");
}
