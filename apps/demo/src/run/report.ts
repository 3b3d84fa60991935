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

export function jsonReport({ ok, requests, warm }: CheckedRun, facts: RunFacts): object {
  const shown = requests.map(jsonRequest);
  return { ok, ...facts, requests: shown, warm_requests: warm.map(jsonRequest) };
}

function jsonRequest({ kvEqual: _, problem: __, ...request }: CheckedRequest): object {
  const round = ([name, value]: [string, number | boolean]) => [
    name,
    typeof value === "number" ? Math.round(value * 1000) / 1000 : value,
  ];
  return Object.fromEntries(Object.entries(request).map(round));
}

export const equality = (equal: boolean) => (equal ? "equal" : "DIFFERENT");

/** A line of each row, in columns as wide as all `rows` need. */
export function columns(rows: readonly (readonly unknown[])[], separator: string): string[] {
  const texts = rows.map((row) => row.map(String));
  const widths = texts[0]?.map((_, at) => Math.max(...texts.map((row) => row[at]?.length ?? 0)));
  return texts.map((row) =>
    row.map((cell, at) => cell.padStart(widths?.[at] ?? 0)).join(separator),
  );
}

/** The output as a table of 100 columns at most. `jsonReport` has more. */
export function tableReport(run: CheckedRun, { backend }: RunFacts): string {
  const header =
    "prompt TTFT queue prefill save connect transfer load first other decode bytes KV tokens";
  const rowOf = (request: CheckedRequest) => [
    request.prompt_tokens,
    request.ttft_ms.toFixed(1),
    request.queue_ms.toFixed(1),
    request.prefill_ms.toFixed(1),
    request.save_ms.toFixed(1),
    request.connect_ms.toFixed(1),
    request.transfer_ms.toFixed(2),
    request.load_ms.toFixed(1),
    request.first_token_ms.toFixed(1),
    request.other_ms.toFixed(1),
    request.decode_ms.toFixed(1),
    request.transfer_bytes.toLocaleString("en"),
    equality(request.kvEqual),
    equality(request.tokens_equal),
  ];
  const { control, ok } = run;
  const all = [...run.requests, ...run.warm];
  const [titles, ...lines] = columns([header.split(" "), ...all.map(rowOf)], " ");
  return [
    `prompts in tokens, times in ms: TTFT is the sum of queue to other; backend ${backend}`,
    "",
    "first contact: connect contains the handshake, the plan and the prepared lists",
    titles,
    ...lines.slice(0, run.requests.length),
    "",
    "second round, other prompts: connections and plans are there",
    ...lines.slice(run.requests.length),
    "",
    ...all.flatMap(({ problem }, i) => (problem === undefined ? [] : [`request ${i}: ${problem}`])),
    `negative control: a zeroed block ${control.changed ? "changed" : "DID NOT CHANGE"} the tokens; without damage they are ${equality(control.restored)}`,
    ok
      ? `all ${all.length} requests have the tokens of a run in one process, and the KV that was sent`
      : "NOT all requests have the tokens of a run in one process",
    "",
  ].join("\n");
}
