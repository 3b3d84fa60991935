// Honest clients of a proxy or an instance, in a process of their own and at another address than
// the attacker's, each request on a connection of its own. Argument: a `Load` as JSON. Prints
// "ready" when requests have warmed up; then a line on stdin begins a measurement, and the next one
// ends it, which is answered with one line, a `Measured`.
import { request } from "node:http";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

/** What honest clients send, in turn, and the tokens of right answers. */
export interface Load {
  readonly url: string;
  readonly prompts: readonly (string | readonly number[])[];
  readonly expected: readonly (readonly number[])[];
  readonly clients: number;
  /** Between two requests of a client. */
  readonly pauseMs: number;
  /** Requests that are not measured. */
  readonly warmUp: number;
}

/** What honest clients saw. */
export interface Measured {
  readonly right: number;
  /** Answers with other tokens. */
  readonly wrong: number;
  /** Errors, with how often each occurred. */
  readonly failed: Readonly<Record<string, number>>;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly longestMs: number;
}

const TIMEOUT_MS = 60_000;

const { url, prompts, expected, clients, pauseMs, warmUp } = JSON.parse(
  process.argv[2] ?? "",
) as Load;
let sent = 0;

function ask(prompt: Load["prompts"][number], maxTokens: number): Promise<number[]> {
  const body = {
    prompt,
    max_tokens: maxTokens,
    temperature: 0,
    ignore_eos: true,
    return_token_ids: true,
  };
  return new Promise((resolve, reject) => {
    const asked = request(`${url}/v1/completions`, {
      method: "POST",
      agent: false,
      localAddress: "127.0.0.9",
      headers: {
        "content-type": "application/json",
        "x-request-id": `honest-${process.pid}-${sent++}`,
      },
      timeout: TIMEOUT_MS,
    });
    asked.on("error", reject).on("timeout", () => asked.destroy(new Error("timeout")));
    asked.on("response", (response) => {
      let text = "";
      response.setEncoding("utf8").on("data", (chunk: string) => {
        text += chunk;
      });
      response.on("error", reject);
      response.on("end", () => {
        if (response.statusCode !== 200) return reject(new Error(`HTTP ${response.statusCode}`));
        const answer = JSON.parse(text) as { choices: { token_ids: number[] }[] };
        resolve(answer.choices[0]?.token_ids ?? []);
      });
    });
    asked.end(JSON.stringify(body));
  });
}

async function measure(over: AbortSignal): Promise<Measured> {
  const tookMs: number[] = [];
  const failed: Record<string, number> = {};
  let [right, wrong] = [0, 0];
  async function client(first: number): Promise<void> {
    for (let at = first; !over.aborted; at += clients) {
      const index = at % prompts.length;
      const wanted = expected[index] ?? [];
      const begun = performance.now();
      try {
        const tokens = await ask(prompts[index] ?? [], wanted.length);
        if (JSON.stringify(tokens) === JSON.stringify(wanted)) right += 1;
        else wrong += 1;
      } catch (error) {
        const name = (error as { code?: string }).code ?? (error as Error).message;
        failed[name] = (failed[name] ?? 0) + 1;
      }
      tookMs.push(performance.now() - begun);
      await sleep(pauseMs);
    }
  }
  await Promise.all(Array.from({ length: clients }, (_, first) => client(first)));
  tookMs.sort((a, b) => a - b);
  const at = (share: number) =>
    Math.round(tookMs[Math.ceil(share * tookMs.length) - 1] ?? Number.NaN);
  return { right, wrong, failed, p50Ms: at(0.5), p99Ms: at(0.99), longestMs: at(1) };
}

for (let at = 0; at < warmUp; at += 1)
  await ask(prompts[0] ?? [], expected[0]?.length ?? 0).catch(() => {});
process.stdout.write("ready\n");
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
while ((await lines.next()).done !== true) {
  const over = new AbortController();
  const measured = measure(over.signal);
  await lines.next();
  over.abort();
  process.stdout.write(`${JSON.stringify(await measured)}\n`);
}
