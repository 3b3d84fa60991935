import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { idsOf, outputOf } from "../../packages/proxy/test/readback/turn-servers.js";
import { linePeer } from "../clients/python.js";
import { inFlightAtEnd, Reasons, startProxy } from "./soak-admin.js";

const GROWTH_LIMIT = 1.25;
/** The proxy gives back after so long what a P may have been reading. */
const SETTLE_MS = 31_000;
/**
 * Prompts of 2,000 tokens: what the proxy remembers of them reaches its limit in the first minutes.
 */
const SYSTEM =
  "words that all conversations begin with, and that are more than sixty-four tokens long. ".repeat(
    23,
  );
const CHAT = "/v1/chat/completions";

interface State {
  /** Addresses of the servers. */
  readonly prefills: readonly string[];
  readonly decode: string;
  readonly wrong: readonly string[];
  readonly counts: Readonly<Record<string, number>>;
  /** Answers whose blocks D holds. */
  readonly pinned: number;
}

type Body = Readonly<Record<string, unknown>>;

/**
 * Conversations through `kv-proxy --readback`, while D is restarted and reads fail. Clients stream,
 * ask for two choices, ask again, or edit what was said. Each complete answer must be that of one
 * engine; nothing that does not fit may be read; memory must not grow; at the end D holds nothing.
 * Resolves to whether all of this held.
 */
export async function soakReadback(
  durationMs: number,
  clients: number,
  everyMs: number,
): Promise<boolean> {
  const script = fileURLToPath(new URL("./turn-upstream.ts", import.meta.url));
  const upstream = linePeer(process.execPath, ["--import", "tsx", script]);
  const tell = (command: string) => upstream.ask<State>({ do: command });
  const { prefills, decode } = await tell("state");
  const { url, memory, end } = await startProxy([
    "--pairing",
    "off",
    "--prefill",
    ...prefills,
    "--decode",
    decode,
    "--readback",
    "--readback-timeout-ms",
    "1000",
  ]);
  const counts = { complete: 0, lost: 0, wrong: 0, restarts: 0 };
  const why = new Reasons();
  const endAtMs = Date.now() + durationMs;

  /** Sends a turn. Returns the text of its answer, if it is complete and right. */
  async function ask(body: Body): Promise<string | undefined> {
    try {
      const response = await fetch(url + CHAT, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      const text = await response.text();
      if (response.status !== 200) throw new Error(`${response.status} ${text.slice(0, 200)}`);
      const wanted = outputOf(idsOf(body), body).text;
      const isRight =
        textOf(text) === wanted || (body["n"] === 2 && text.includes(JSON.stringify(wanted)));
      counts[isRight ? "complete" : "wrong"] += 1;
      return isRight ? wanted : undefined;
    } catch (error) {
      counts.lost += 1;
      why.add(String(error));
      return undefined;
    }
  }

  async function client(name: number): Promise<void> {
    let conversation = 0;
    while (Date.now() < endAtMs) {
      conversation += 1;
      let messages: Body[] = [{ role: "system", content: `${SYSTEM}${name} ${conversation}` }];
      for (let turn = 0; turn < 12 && Date.now() < endAtMs; turn += 1) {
        messages = [...messages, { role: "user", content: `question ${turn} of ${name}` }];
        const chance = Math.random();
        const body = { model: "m", messages, max_tokens: 20, stream: chance > 0.4 };
        const n = chance < 0.05 ? { n: 2, seed: 1 } : {};
        const answer = await ask({ ...body, ...n });
        // Asked again, or with something else in the middle.
        if (chance > 0.85 && chance < 0.9) await ask({ ...body, seed: turn });
        if (chance > 0.9 && chance < 0.95)
          messages = [...messages.slice(0, -2), ...messages.slice(-1)];
        messages = [...messages, { role: "assistant", content: answer ?? "nothing" }];
      }
    }
  }

  async function chaos(): Promise<void> {
    for (let at = 0; Date.now() + everyMs < endAtMs; at += 1) {
      await sleep(everyMs);
      await tell(at % 20 === 10 ? "break" : at % 2 === 0 ? "restart" : "fail");
      counts.restarts += 1;
    }
  }

  await Promise.all([chaos(), ...Array.from({ length: clients }, (_, name) => client(name))]);
  const { early, late } = memory.ended();
  await sleep(SETTLE_MS);
  const inFlight = await inFlightAtEnd(url);
  const before = await tell("state");
  const code = await end();
  const after = await tell("state");
  await upstream.close();

  const figures = {
    ...counts,
    early_mib: Math.round(early),
    late_mib: Math.round(late),
    exit_code: code,
    in_flight: inFlight,
    servers: after.counts,
    wrong_reads: after.wrong,
    pinned_before_close: before.pinned,
    pinned: after.pinned,
  };
  console.log(JSON.stringify(figures));
  why.print((reason, count) => `lost ${count}: ${reason}`);
  return (
    counts.lost === 0 &&
    counts.wrong === 0 &&
    counts.complete > 0 &&
    after.wrong.length === 0 &&
    after.pinned === 0 &&
    inFlight === 0 &&
    (after.counts["reads"] ?? 0) > counts.complete / 4 &&
    late / early <= GROWTH_LIMIT &&
    code === 0
  );
}

/** The text of an answer's first choice. */
function textOf(answer: string): string {
  interface Answer {
    readonly choices: readonly {
      readonly message?: { content: string };
      readonly delta?: { content?: string };
    }[];
  }
  const events = answer.startsWith("data:")
    ? answer
        .split("\n")
        .filter((line) => line.startsWith("data: {"))
        .map((line) => line.slice("data: ".length))
    : [answer];
  return events
    .map((event) => (JSON.parse(event) as Answer).choices[0])
    .map((choice) => choice?.message?.content ?? choice?.delta?.content ?? "")
    .join("");
}
