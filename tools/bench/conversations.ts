import { setTimeout } from "node:timers/promises";
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

export interface EndedTurn extends CompletionOutcome {
  readonly conversation: number;
  readonly turn: number;
  readonly promptTokens: number;
  /** Tokens of the prompt whose KV no D has from the turn before. */
  readonly newTokens: number;
  readonly startedAtMs: number;
  readonly endedAtMs: number;
  readonly tokenMs: number;
}

export interface Client {
  send(prompt: readonly number[], maxTokens: number): Promise<CompletionOutcome>;
  now(): number;
  sleep(ms: number): Promise<unknown>;
}

export function clientOf(url: string, name: string): Client {
  let sent = 0;
  return {
    send: (promptTokens, maxTokens) =>
      complete({ url, requestId: `${name}-${++sent}`, promptTokens, maxTokens }),
    now: () => performance.now(),
    sleep: (ms) => setTimeout(ms),
  };
}

/** Holds all conversations; none shares its own part with another, or with one of another `seed`. */
export async function converse(
  client: Client,
  traffic: Traffic,
  seed: number,
): Promise<EndedTurn[]> {
  const { conversations, turns, addedTokens, outputTokens, pauseMs } = traffic;
  const shared = tokens(traffic.sharedTokens ?? 0, seed, 0);
  const ended: EndedTurn[] = [];
  const one = async (conversation: number) => {
    await client.sleep((conversation * pauseMs) / conversations);
    let prompt = [...shared, ...tokens(traffic.firstTokens, seed, conversation + 1)];
    let heldTokens = 0;
    for (let turn = 1; turn <= turns; turn += 1) {
      const startedAtMs = client.now();
      const outcome = await client.send(prompt, outputTokens);
      ended.push({
        ...outcome,
        conversation,
        turn,
        promptTokens: prompt.length,
        newTokens: prompt.length - heldTokens,
        startedAtMs,
        endedAtMs: client.now(),
        tokenMs: (outcome.totalMs - outcome.ttftMs) / (outputTokens - 1),
      });
      // D has not computed the KV of an answer's last token.
      heldTokens = prompt.length + outputTokens - 1;
      const added = addedTokens[(turn + conversation) % addedTokens.length] ?? 0;
      const next = tokens(added, seed, 1000 * turn + conversation + 17);
      prompt = [...prompt, ...outcome.tokens, ...next];
      await client.sleep(pauseMs);
    }
  };
  await Promise.all(Array.from({ length: conversations }, (_, conversation) => one(conversation)));
  return ended;
}

/** Tokens that no other `part`, and none of another `seed`, begins with. */
export function tokens(count: number, seed: number, part: number): number[] {
  return Array.from(
    { length: count },
    (_, at) => 3 + ((seed * 7919 + part * 104_729 + at * 31 + ((part * at) % 13)) % 900),
  );
}
