// Each request is on a connection of its own. Argument: a `Load` as JSON. Prints "ready" when
// requests have warmed up. Then a line on stdin begins a measurement ("begun"), and the next one
// ends it (a `Measured`).
import { connect } from "node:net";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { zmqSideChannel } from "@kv/side-channel";
import { Agent, request } from "undici";

/** `wanted`: what a right answer contains. */
export type Question =
  | { readonly url: string; readonly body?: object; readonly wanted: string }
  | { readonly port: number; readonly line: string; readonly wanted: string }
  | { readonly handshake: number };

export interface Load {
  readonly questions: readonly Question[];
  readonly clients: number;
  readonly pauseMs: number;
}

const WARM_UP = 20;
/** Not the attacker's: limits per address must not hit the honest. */
const ADDRESS = "127.0.0.9";
const dispatcher = new Agent({
  connect: { localAddress: ADDRESS },
  pipelining: 0,
  headersTimeout: 60_000,
});
const { questions, clients, pauseMs } = JSON.parse(process.argv[2] ?? "") as Load;

async function ask(question: Question) {
  if ("handshake" in question) return shakeHands(question.handshake);
  const answer = "url" in question ? await post(question) : await tell(question);
  if (!answer.includes(question.wanted)) throw new Error(`wrong: ${answer.slice(0, 100)}`);
}

async function post({ url, body }: Extract<Question, { url: string }>): Promise<string> {
  const posted = { method: "POST", body: JSON.stringify(body) } as const;
  const answer = await request(url, {
    ...(body === undefined ? {} : posted),
    headers: { "content-type": "application/json" },
    dispatcher,
  });
  if (answer.statusCode !== 200) throw new Error(`HTTP ${answer.statusCode}`);
  return answer.body.text();
}

async function tell({ port, line, wanted }: Extract<Question, { port: number }>): Promise<string> {
  const socket = connect({ host: "127.0.0.1", port, localAddress: ADDRESS });
  let answer = "";
  try {
    socket.write(`${line}\n`);
    for await (const chunk of socket) {
      answer += String(chunk);
      if (answer.includes(wanted)) break;
    }
    return answer;
  } finally {
    socket.destroy();
  }
}

async function shakeHands(port: number) {
  const side = zmqSideChannel();
  try {
    const frames = [Buffer.alloc(17)];
    await side.request({ host: "127.0.0.1", port, frames, timeoutMs: 5000 });
  } finally {
    await side.close();
  }
}

export type Measured = Awaited<ReturnType<typeof measure>>;

async function measure(over: AbortSignal) {
  const tookMs: number[] = [];
  const failed: Record<string, number> = {};

  async function client(first: number) {
    for (let at = first; !over.aborted; at += clients) {
      const begunMs = performance.now();
      await ask(questions[at % questions.length] as Question).catch((error: Error) => {
        const name = (error as { code?: string }).code ?? error.message;
        failed[name] = (failed[name] ?? 0) + 1;
      });
      tookMs.push(performance.now() - begunMs);
      await sleep(pauseMs);
    }
  }

  await Promise.all(Array.from({ length: clients }, (_, first) => client(first)));
  tookMs.sort((one, other) => one - other);
  const at = (share: number) => Math.round(tookMs[Math.ceil(share * tookMs.length) - 1] ?? 0);
  const wrong = Object.values(failed).reduce((sum, count) => sum + count, 0);
  // The longest includes each stall of the server's event loop.
  return { right: tookMs.length - wrong, failed, p99Ms: at(0.99), longestMs: at(1) };
}

for (let sent = 0; sent < WARM_UP; sent += 1)
  await ask(questions[sent % questions.length] as Question).catch(() => {});
console.log("ready");
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
while ((await lines.next()).done !== true) {
  const over = new AbortController();
  const measured = measure(over.signal);
  console.log("begun");
  await lines.next();
  over.abort();
  console.log(JSON.stringify(await measured));
}
process.exit();
