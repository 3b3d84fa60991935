import { type Clock, systemClock } from "@kv/interface";
import { type CompletionOutcome, complete } from "../../apps/demo/src/run/completion-client.js";

/** Conversations that are held at once; each turn has all before it in its prompt. */
export interface Traffic {
  readonly conversations: number;
  readonly turns: number;
  readonly sharedTokens?: number;
  readonly firstTokens: number;
  /** What a turn adds, in turn. */
  readonly addedTokens: readonly number[];
  readonly outputTokens: number;
  readonly pauseMs: number;
}

export type EndedTurn = Awaited<ReturnType<typeof converse>>[number];

/** @throws The errors of the request. */
export type Send = (prompt: readonly number[], maxTokens: number) => Promise<CompletionOutcome>;

export function sendTo(url: string, name: string): Send {
  let sent = 0;
  return (promptTokens, maxTokens) =>
    complete({ url, requestId: `${name}-${++sent}`, promptTokens, maxTokens });
}

/** None shares its own part with another, or with one of another `seed`. */
export async function converse(
  send: Send,
  traffic: Traffic,
  seed: number,
  clock: Clock = systemClock(),
) {
  const { conversations, turns, addedTokens, outputTokens, pauseMs } = traffic;
  const sleep = (ms: number) =>
    new Promise<void>((resolve) => void clock.setTimer(resolve, ms, { ref: true }));
  const shared = tokens(traffic.sharedTokens ?? 0, seed, 0);
  const one = async (conversation: number) => {
    const ended = [];
    await sleep((conversation * pauseMs) / conversations);
    let prompt = [...shared, ...tokens(traffic.firstTokens, seed, conversation + 1)];
    let heldTokens = 0;
    for (let turn = 1; turn <= turns; turn += 1) {
      const startedAtMs = clock.now();
      const outcome = await send(prompt, outputTokens);
      ended.push({
        ...outcome,
        conversation,
        turn,
        promptTokens: prompt.length,
        newTokens: prompt.length - heldTokens,
        startedAtMs,
        endedAtMs: clock.now(),
        tokenMs: (outcome.totalMs - outcome.ttftMs) / (outputTokens - 1),
      });
      // D has not computed the KV of an answer's last token.
      heldTokens = prompt.length + outputTokens - 1;
      const added = addedTokens[(turn + conversation) % addedTokens.length] ?? 0;
      const next = tokens(added, seed, 1000 * turn + conversation + 17);
      prompt = [...prompt, ...outcome.tokens, ...next];
      await sleep(pauseMs);
    }
    return ended;
  };
  const all = Array.from({ length: conversations }, (_, conversation) => one(conversation));
  return (await Promise.all(all)).flat();
}

/** Tokens that no other `part`, and none of another `seed`, begins with. */
export function tokens(count: number, seed: number, part: number): number[] {
  return Array.from(
    { length: count },
    (_, at) => 3 + ((seed * 7919 + part * 104_729 + at * 31 + ((part * at) % 13)) % 900),
  );
}
