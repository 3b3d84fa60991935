// Honest clients of a proxy or an instance, in a process of their own and at another address than the attacker's. Arguments: the URL, and a
// file with {"prompts": number[][], "expected": number[][]}. A line "measure SECONDS" on stdin is answered with one line, a `Measured`.
import { readFileSync } from "node:fs";
import { request } from "node:http";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

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

const CLIENTS = 2;
const PAUSE_MS = 100;
const TIMEOUT_MS = 60_000;

const [, , url = "", file = ""] = process.argv;
const { prompts, expected } = JSON.parse(readFileSync(file, "utf8")) as {
  prompts: number[][];
  expected: number[][];
};
let sent = 0;

function ask(prompt: readonly number[], maxTokens: number): Promise<number[]> {
  const body = { prompt, max_tokens: maxTokens, temperature: 0, ignore_eos: true, return_token_ids: true };
  return new Promise((resolve, reject) => {
    const asked = request(`${url}/v1/completions`, {
      method: "POST",
      agent: false,
      localAddress: "127.0.0.9",
      headers: { "content-type": "application/json", "x-request-id": `honest-${process.pid}-${sent++}` },
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

async function measure(seconds: number): Promise<Measured> {
  const tookMs: number[] = [];
  const failed: Record<string, number> = {};
  let [right, wrong] = [0, 0];
  const untilMs = performance.now() + seconds * 1000;
  async function client(first: number): Promise<void> {
    for (let at = first; performance.now() < untilMs; at += CLIENTS) {
      const index = at % prompts.length;
      const wanted = expected[index] ?? [];
      const begun = performance.now();
      try {
        const tokens = await ask(prompts[index] ?? [], wanted.length);
        if (JSON.stringify(tokens) === JSON.stringify(wanted)) right += 1;
        else wrong += 1;
        tookMs.push(performance.now() - begun);
      } catch (error) {
        const name = (error as { code?: string }).code ?? (error as Error).message;
        failed[name] = (failed[name] ?? 0) + 1;
      }
      await sleep(PAUSE_MS);
    }
  }
  await Promise.all(Array.from({ length: CLIENTS }, (_, first) => client(first)));
  tookMs.sort((a, b) => a - b);
  const at = (share: number) => Math.round(tookMs[Math.ceil(share * tookMs.length) - 1] ?? Number.NaN);
  return { right, wrong, failed, p50Ms: at(0.5), p99Ms: at(0.99), longestMs: at(1) };
}

process.stdout.write("ready\n");
for await (const line of createInterface({ input: process.stdin })) {
  const seconds = Number(/^measure (\d+)$/.exec(line)?.[1]);
  process.stdout.write(`${JSON.stringify(await measure(seconds))}\n`);
}
