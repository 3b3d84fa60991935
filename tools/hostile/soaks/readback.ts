import { setTimeout as sleep } from "node:timers/promises";
import { idsOf, outputOf } from "../../../packages/proxy/test/readback/turn-servers.js";
import { startProxy } from "../attacks/victims.js";
import type { PartOptions } from "../main.js";
import { ObservedProcess } from "../observed-process.js";
import type { Check } from "../row.js";
import { told } from "./requests.js";
import { endProxy, send, soak, Tally } from "./soak.js";

/** After so long the proxy gives back what a P may have been reading. */
const SETTLE_MS = 31_000;
/** What the proxy remembers of such prompts reaches its limit in the first minutes. */
const SYSTEM =
  "words that all conversations begin with, and that are more than sixty-four tokens long. ".repeat(
    23,
  );
const TURNS = 12;

interface State {
  readonly prefills: readonly string[];
  readonly decode: string;
  readonly wrong: readonly string[];
  readonly counts: Readonly<Record<string, number>>;
  /** Answers whose blocks D holds. */
  readonly pinned: number;
}

type Body = Readonly<Record<string, unknown>>;

/** D is restarted, and reads fail. Nothing that does not fit may be read. */
export async function readbackSoak(options: PartOptions): Promise<Check[]> {
  const servers = new ObservedProcess("tools/bench/turn-upstream.ts");
  const tell = async (command: string) =>
    JSON.parse(await servers.ask(JSON.stringify({ do: command }))) as State;
  const { prefills, decode } = await tell("state");
  const { proxy, proxyUrl } = await startProxy(
    prefills,
    [decode],
    ["--pairing", "off", "--readback", "--readback-timeout-ms", "1000"],
  );
  const tally = new Tally();

  /** Returns the text of the answer, if it is complete and right. */
  async function answer(body: Body): Promise<string | undefined> {
    try {
      const { status, text } = await send(`${proxyUrl}/v1/chat/completions`, body);
      if (status !== 200) throw new Error(`${status} ${text.slice(0, 200)}`);
      const wanted = outputOf(idsOf(body), body).text;
      const isRight = told(status, text).choices.some((choice) => choice.text === wanted);
      tally.add(isRight ? "complete" : "wrong", text.slice(0, 200));
      return isRight ? wanted : undefined;
    } catch (error) {
      tally.add("lost", String(error));
      return undefined;
    }
  }

  let conversations = 0;
  async function converse(client: number) {
    conversations += 1;
    const messages: Body[] = [{ role: "system", content: `${SYSTEM}${client} ${conversations}` }];
    for (let turn = 0; turn < TURNS; turn += 1) {
      messages.push({ role: "user", content: `question ${turn} of ${client}` });
      const chance = Math.random();
      const body = { model: "m", messages, max_tokens: 20, stream: chance > 0.4 };
      const text = await answer({ ...body, ...(chance < 0.05 ? { n: 2, seed: 1 } : {}) });
      // Asked again, or with something else in the middle.
      if (chance > 0.85 && chance < 0.9) await answer({ ...body, seed: turn });
      if (chance > 0.9 && chance < 0.95) messages.splice(-2, 1);
      messages.push({ role: "assistant", content: text ?? "nothing" });
    }
  }

  async function change(turn: number) {
    if (turn % 20 === 10) await tell("break");
    else await tell(turn % 2 === 0 ? "restart" : "fail");
    tally.add("changes");
  }

  const memory = await soak(options, proxy, converse, change);
  await sleep(SETTLE_MS);
  const end = await endProxy(proxy, proxyUrl);
  const { wrong, pinned, counts } = await tell("state");
  const reads = counts["reads"] ?? 0;
  return [
    ...tally.checks("complete", ["lost", "wrong"]),
    ...memory,
    ...end,
    [`${wrong.length} wrong reads ${wrong.join()}`, wrong.length === 0],
    [`${pinned} answers held by D`, pinned === 0],
    [`servers ${JSON.stringify(counts)}`, reads > tally.of("complete") / 4],
  ];
}
