import { type Ambient, type AmbientOptions, ambient, KvError } from "@kv/interface";
import { reportOfChecks } from "@kv/program";
import { judge } from "../checks/list.js";
import type { Report } from "../checks/report.js";
import type { Answer, EngineServer } from "../http/engine-server.js";
import { checkLeaks, readUsedBlocks, unfinishedRequests } from "../load/block-leaks.js";
import { randomPrompt } from "../load/load.js";
import { growth, hasNixlConnector, promptTokens, readCounters } from "./counters.js";
import type { LaneEvidence } from "./lane-checks.js";
import type { HeldBlocks, SeenDeployment, SentPrompt } from "./verify-checks.js";

/** Options of `verify`. */
export interface VerifyOptions extends AmbientOptions {
  /** What clients send requests to: a router, a gateway, a front end of any kind. */
  readonly front: EngineServer;
  readonly prefill: readonly EngineServer[];
  readonly decode: readonly EngineServer[];
  /** One engine whose answers are right. @default the first prefill server */
  readonly reference?: EngineServer | undefined;
  /** Prompts to send. @default 8 */
  readonly requests?: number | undefined;
  /** Their length in tokens. @default 512 */
  readonly promptTokens?: number | undefined;
  /** Tokens of each answer. @default 8 */
  readonly outputTokens?: number | undefined;
  /**
   * How long the servers may take to free the blocks of what they have answered, in ms. @default
   * 10_000
   */
  readonly freeWithinMs?: number | undefined;
  /** How long a server may take to count what it has done, in ms. @default 1_000 */
  readonly countedWithinMs?: number | undefined;
  /**
   * What is known about the way of the bytes. Called when the prompts have been answered. @default
   * nothing is known
   */
  readonly lane?: (() => Promise<LaneEvidence>) | undefined;
}

const POLL_MS = 50;

/**
 * Sends prompts that no cache holds to a deployment, one after another, and compares what its
 * servers counted, freed and answered with what a pair that moves KV does. Faults of the deployment
 * are part of the report.
 *
 * @throws `KV_PROXY_UPSTREAM_FAILED` when a server has no /metrics.
 */
export async function verify(options: VerifyOptions): Promise<Report> {
  const seen = await observe(options, ambient(options));
  const moved = seen.totals.decode.transfers + seen.totals.prefill.transfers > 0;
  const lane = moved ? await options.lane?.() : undefined;
  return reportOfChecks(judge({ deployment: seen, lane }));
}

async function observe(
  options: VerifyOptions,
  { clock, random }: Ambient,
): Promise<SeenDeployment> {
  const { front, prefill, decode, requests = 8, outputTokens = 8 } = options;
  const { promptTokens: length = 512, reference = prefill[0], freeWithinMs = 10_000 } = options;
  const { countedWithinMs = 1_000 } = options;
  if (prefill.length === 0 || decode.length === 0 || reference === undefined)
    throw new KvError("KV_CONFIG_INVALID", "verify needs a prefill and a decode server");
  const sides = [
    ...prefill.map((server) => ({ role: "prefill" as const, server })),
    ...decode.map((server) => ({ role: "decode" as const, server })),
  ];
  const read = async () => {
    const [atPrefill, atDecode] = await Promise.all([readCounters(prefill), readCounters(decode)]);
    return { prefill: atPrefill, decode: atDecode };
  };
  type Counted = Awaited<ReturnType<typeof read>>;
  const since = (before: Counted, after: Counted) => ({
    prefill: growth(before.prefill, after.prefill),
    decode: growth(before.decode, after.decode),
  });
  const withoutConnector: string[] = [];
  for (const { server } of sides)
    if (!hasNixlConnector(await server.metrics())) withoutConnector.push(server.url);
  const used = await Promise.all(sides.map(({ server }) => readUsedBlocks(server)));

  /**
   * What was counted since `before`, when D has counted the prompt and a transfer, or
   * `countedWithinMs` later.
   */
  async function counted(before: Counted): Promise<Counted> {
    const untilMs = clock.now() + countedWithinMs;
    for (;;) {
      const grown = since(before, await read());
      const isMoved = grown.decode.transfers + grown.prefill.transfers > 0;
      if ((isMoved && promptTokens(grown.decode) >= length) || clock.now() > untilMs) return grown;
      await new Promise<void>((resolve) => clock.setTimer(resolve, POLL_MS, { ref: true }));
    }
  }

  const first = await read();
  const sent: (Omit<SentPrompt, "expected"> & { readonly prompt: readonly number[] })[] = [];
  for (let index = 0; index < requests; index++) {
    const prompt = randomPrompt(length, random);
    const before = await read();
    let answer: Answer | undefined;
    let failure: KvError | undefined;
    try {
      answer = await front.complete(prompt, outputTokens);
    } catch (thrown) {
      failure = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", "the prompt failed");
    }
    sent.push({ prompt, length, answer, failure, counted: await counted(before) });
  }
  const totals = since(first, await read());

  const blocks: HeldBlocks[] = [];
  for (const [index, { role, server }] of sides.entries()) {
    // Nothing is left unread on purpose, so no lease is waited for.
    const limits = { unnotifiedBlocks: 0, leaseMs: 0, leaseMarginMs: 0, freeWithinMs };
    const leaks = await checkLeaks({ server, clock, before: used[index], ...limits });
    const running = unfinishedRequests(await server.metrics());
    blocks.push({ role, url: server.url, leaks, running });
  }

  const prompts: SentPrompt[] = [];
  for (const { prompt, ...rest } of sent) {
    const expected =
      rest.answer && (await reference.complete(prompt, outputTokens).catch(() => undefined));
    prompts.push({ ...rest, expected });
  }
  return { prompts, totals, withoutConnector, blocks, reference: reference.url };
}
