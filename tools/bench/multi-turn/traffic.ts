import { setTimeout } from "node:timers/promises";
import { type Log, type LogFields, silentLog } from "@kv/interface";
import { complete } from "../../../apps/demo/src/run/completion-client.js";
import { median } from "../report.js";

/**
 * Conversations of an agent: each turn has the answer of a tool, of 50 to 500 tokens, and the model
 * says a little.
 */
export interface Traffic {
  readonly conversations: number;
  readonly turns: number;
  readonly firstTokens: number;
  /** What a turn adds, in turn. */
  readonly addedTokens: readonly number[];
  readonly outputTokens: number;
  /** Between an answer and the next turn. */
  readonly pauseMs: number;
}

export const AGENTS: Traffic = {
  conversations: 8,
  turns: 20,
  firstTokens: 500,
  outputTokens: 16,
  pauseMs: 100,
  addedTokens: [50, 200, 500, 100, 350],
};

/** `--short`. */
export const SHORT: Traffic = { ...AGENTS, conversations: 4, turns: 5 };

export interface EndedTurn {
  readonly conversation: number;
  readonly requestId: string;
  /** The conversation's turn before. */
  readonly before: EndedTurn | undefined;
  readonly turn: number;
  readonly promptTokens: number;
  /** Tokens of the prompt whose KV no D has from the turn before. */
  readonly newTokens: number;
  /** The answer. */
  readonly tokens: readonly number[];
  /** On the client's clock. */
  readonly startedAtMs: number;
  readonly endedAtMs: number;
  readonly ttftMs: number;
  /** For each token after the first. */
  readonly tokenMs: number;
}

export interface Client {
  send(
    prompt: readonly number[],
    maxTokens: number,
  ): Promise<{ requestId: string; tokens: readonly number[]; ttftMs: number; totalMs: number }>;
  now(): number;
  sleep(ms: number): Promise<void>;
}

/** Clients of a server on the real clock. */
export function clientOf(url: string, name: string): Client {
  let sent = 0;
  return {
    send: (promptTokens, maxTokens) =>
      complete({ url, requestId: `${name}-${++sent}`, promptTokens, maxTokens }),
    now: () => performance.now(),
    sleep: (ms) => setTimeout(ms),
  };
}

/** The same conversations with readback and without. */
export interface BothWays<Played> {
  readonly traffic: Traffic;
  readonly on: Played;
  readonly off: Played;
  /** Turns with readback whose tokens are those of one engine. */
  readonly equal: number;
}

/** What the proxy's record says of a request. */
export interface Served {
  readonly readback?: string;
  readonly readbackTokens?: number;
  readonly decode?: string;
  /** How often it began again with P. */
  readonly restarts?: number;
}

/** The records of a proxy's requests, by request id, and the log that fills them. */
export function recordRequests(): {
  readonly records: ReadonlyMap<string, Served>;
  readonly log: Log;
} {
  const records = new Map<string, Served>();
  const info = (event: string, fields: LogFields = {}) => {
    if (event === "request-done")
      records.set(String(fields["requestId"]), fields as unknown as Served);
  };
  return { records, log: { ...silentLog, info } };
}

/**
 * How many turns after the first were read, and in how many of these P computed the new tokens and
 * less than a block.
 */
export function readTurns(
  turns: readonly EndedTurn[],
  records: ReadonlyMap<string, Served>,
  blockTokens: number,
): { readonly further: number; readonly used: number; readonly newOnly: number } {
  const further = turns.filter(({ turn }) => turn > 1);
  const used = further.filter(({ requestId }) => records.get(requestId)?.readback === "used");
  const newOnly = used.filter(({ requestId, promptTokens, newTokens }) => {
    const computed = promptTokens - (records.get(requestId)?.readbackTokens ?? 0);
    return computed < newTokens + blockTokens;
  });
  return { further: further.length, used: used.length, newOnly: newOnly.length };
}

/** Prompt tokens that P has computed, by the proxy's records. */
export function computedTokens(
  turns: readonly EndedTurn[],
  records: ReadonlyMap<string, Served> = new Map(),
): number {
  const readTokens = ({ requestId }: EndedTurn) => records.get(requestId)?.readbackTokens ?? 0;
  return turns.reduce((sum, turn) => sum + turn.promptTokens - readTokens(turn), 0);
}

/** How many turns have the answer that the same turn has in `reference`. */
export function equalTurns(turns: readonly EndedTurn[], reference: readonly EndedTurn[]): number {
  const keyOf = ({ conversation, turn, tokens: answer }: EndedTurn) =>
    `${conversation} ${turn} ${answer.join()}`;
  const wanted = new Set(reference.map(keyOf));
  return turns.filter((turn) => wanted.has(keyOf(turn))).length;
}

/** Output tokens a second of all turns together. */
export function tokensPerSecond(turns: readonly EndedTurn[], outputTokens: number): number {
  const startMs = Math.min(...turns.map(({ startedAtMs }) => startedAtMs));
  const endMs = Math.max(...turns.map(({ endedAtMs }) => endedAtMs));
  return (1000 * turns.length * outputTokens) / (endMs - startMs);
}

/**
 * Holds all conversations at once; none shares a begin with another, or with one of another `seed`.
 */
export async function converse(
  client: Client,
  traffic: Traffic,
  seed: number,
): Promise<EndedTurn[]> {
  const { conversations, turns, firstTokens, addedTokens, outputTokens, pauseMs } = traffic;
  const ended: EndedTurn[] = [];
  const one = async (conversation: number) => {
    await client.sleep((conversation * pauseMs) / conversations);
    let prompt = tokens(firstTokens, seed, conversation);
    let before: EndedTurn | undefined;
    for (let turn = 1; turn <= turns; turn += 1) {
      const startedAtMs = client.now();
      const {
        requestId,
        ttftMs,
        tokens: answer,
        totalMs,
      } = await client.send(prompt, outputTokens);
      // D has not computed the KV of an answer's last token.
      const heldTokens = before === undefined ? 0 : before.promptTokens + outputTokens - 1;
      const promptTokens = prompt.length;
      before = {
        conversation,
        requestId,
        before,
        turn,
        promptTokens,
        tokens: answer,
        ttftMs,
        newTokens: promptTokens - heldTokens,
        startedAtMs,
        endedAtMs: client.now(),
        tokenMs: (totalMs - ttftMs) / (outputTokens - 1),
      };
      ended.push(before);
      const added = addedTokens[(turn + conversation) % addedTokens.length] ?? 0;
      prompt = [...prompt, ...answer, ...tokens(added, seed, 1000 * turn + conversation + 17)];
      await client.sleep(pauseMs);
    }
  };
  await Promise.all(Array.from({ length: conversations }, (_, conversation) => one(conversation)));
  return ended;
}

/** Tokens that no other `part`, and none of another `seed`, begins with. */
export function tokens(count: number, seed: number, part: number, vocabulary = 900): number[] {
  return Array.from(
    { length: count },
    (_, at) => 3 + ((seed * 7919 + part * 104_729 + at * 31 + ((part * at) % 13)) % vocabulary),
  );
}

/** Upper ends of the groups of prompts' lengths. */
const LENGTHS = [1000, 2000, 4000, 8000];
/** Upper ends of the groups of turns. */
const TURNS = [5, 10, 20];

/**
 * Median TTFT of turns after the first with readback, as a ratio to that without, by length and by
 * turn. Groups without turns are left out.
 */
export function ratios(on: readonly EndedTurn[], off: readonly EndedTurn[]) {
  const by = (ends: readonly number[], what: "promptTokens" | "turn") =>
    ends.flatMap((end, at) => {
      const isIn = (one: EndedTurn) =>
        one.turn > 1 && one[what] > (ends[at - 1] ?? 0) && one[what] <= end;
      const [ours = [], theirs = []] = [on, off].map((turns) =>
        turns.filter(isIn).map(({ ttftMs }) => ttftMs),
      );
      if (ours.length === 0 || theirs.length === 0) return [];
      return [
        { end, onMs: median(ours), offMs: median(theirs), ratio: median(ours) / median(theirs) },
      ];
    });
  return { byLength: by(LENGTHS, "promptTokens"), byTurn: by(TURNS, "turn") };
}

export type Ratios = ReturnType<typeof ratios>;

/**
 * From which length of the prompt readback is at least 3 % faster, and at all longer ones;
 * undefined where it never is.
 */
export function paysFrom({ byLength }: Ratios): number | undefined {
  const last = byLength.findLastIndex(({ ratio }) => ratio > 0.97);
  const first = byLength[last + 1];
  return first === undefined ? undefined : (LENGTHS[LENGTHS.indexOf(first.end) - 1] ?? 0);
}

/** What P has computed, read and found in its prefix cache, of its metrics. */
export function promptTokensOf(metrics: string): Readonly<Record<string, number>> {
  const sample = /^vllm:prompt_tokens_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)/gm;
  const sums: Record<string, number> = {};
  for (const [, source = "", count] of metrics.matchAll(sample))
    sums[source] = (sums[source] ?? 0) + Number(count);
  return sums;
}
