import { type AmbientOptions, ambient, type Clock, KvError } from "@kv/interface";
import { reportOfChecks } from "@kv/program";
import { type Report, ROLES } from "../checks/report.js";
import type { Answer, EngineServer } from "../http/engine-server.js";
import { checkLeaks, readUsedBlocks, sleep, unfinishedRequests } from "../load/block-leaks.js";
import { randomPrompt } from "../load/load.js";
import { type LaneEvidence, laneChecks } from "./lane.js";
import {
  blockChecks,
  type Counted,
  growth,
  type HeldBlocks,
  hasNixlConnector,
  moved,
  promptTokens,
  readCounters,
  requestChecks,
  type SentPrompt,
  tokenChecks,
  transferChecks,
} from "./verify-checks.js";

/** Options of `verify`. */
export interface VerifyOptions extends AmbientOptions {
  /** A router, gateway or other front end. */
  readonly front: EngineServer;
  readonly prefill: readonly EngineServer[];
  readonly decode: readonly EngineServer[];
  /** An engine whose answers are right. @default the first prefill server */
  readonly reference?: EngineServer | undefined;
  /** @default 8 */
  readonly requests?: number | undefined;
  /** @default 512 */
  readonly promptTokens?: number | undefined;
  /** @default 8 */
  readonly outputTokens?: number | undefined;
  /** Time for servers to free answered requests' blocks, in ms. @default 10_000 */
  readonly freeWithinMs?: number | undefined;
  /** Time for a server to count its work, in ms. @default 1_000 */
  readonly countedWithinMs?: number | undefined;
  /** Called after the answers. @default nothing is known */
  readonly lane?: (() => Promise<LaneEvidence>) | undefined;
  /** Ends between two prompts. */
  readonly signal?: AbortSignal | undefined;
  /** Gets the number of answers, of which the front end and the reference each give `requests`. */
  readonly progress?: ((done: number) => void) | undefined;
}

const POLL_MS = 50;

/**
 * Sends uncached prompts and compares what the servers counted, freed and answered with a pair that
 * moves KV. The report has the deployment's faults.
 *
 * @throws `KV_PROXY_UPSTREAM_FAILED` when a server has no /metrics; `KV_REQUEST_ABORTED`.
 */
export async function verify(options: VerifyOptions): Promise<Report> {
  const { clock, random } = ambient(options);
  const { front, reference = options.prefill[0], freeWithinMs = 10_000 } = options;
  const { requests = 8, promptTokens: length = 512, outputTokens = 8 } = options;
  if (options.decode.length === 0 || reference === undefined)
    throw new KvError("KV_CONFIG_INVALID", "verify needs a prefill and a decode server");
  const sides = ROLES.flatMap((role) => options[role].map((server) => ({ role, server })));
  const withoutConnector: string[] = [];
  for (const { server } of sides)
    if (!hasNixlConnector(await server.metrics())) withoutConnector.push(server.url);
  const used = await Promise.all(sides.map(({ server }) => readUsedBlocks(server)));

  let done = 0;
  const answered = () => {
    if (options.signal?.aborted === true)
      throw new KvError("KV_REQUEST_ABORTED", "the prompts were interrupted");
    done += 1;
    options.progress?.(done);
  };

  const first = await readCounters(options);
  const prompts: SentPrompt[] = [];
  for (let index = 0; index < requests; index++) {
    const prompt = randomPrompt(length, random);
    const before = await readCounters(options);
    let answer: Answer | undefined;
    let failure: KvError | undefined;
    try {
      answer = await front.complete(prompt, outputTokens);
    } catch (thrown) {
      failure = KvError.from(thrown, "KV_PROXY_UPSTREAM_FAILED", "the prompt failed");
    }
    const counted = await countedSince(before, length, options, clock);
    prompts.push({ prompt, answer, failure, counted });
    answered();
  }
  const totals = growth(first, await readCounters(options));

  const blocks: HeldBlocks[] = [];
  for (const [index, { role, server }] of sides.entries()) {
    // All is read, so no lease is waited for.
    const limits = { unnotifiedBlocks: 0, leaseMs: 0, leaseMarginMs: 0, freeWithinMs };
    const leaks = await checkLeaks({ server, clock, before: used[index], ...limits });
    const running = unfinishedRequests(await server.metrics());
    blocks.push({ role, url: server.url, leaks, running });
  }

  for (const sent of prompts) {
    if (sent.answer !== undefined)
      sent.expected = await reference.complete(sent.prompt, outputTokens).catch(() => undefined);
    answered();
  }
  const deployment = { prompts, totals, withoutConnector, blocks, reference: reference.url };
  const lane = moved(totals).transfers > 0 ? await options.lane?.() : undefined;
  return reportOfChecks([
    ...requestChecks(deployment),
    ...transferChecks(deployment),
    ...(lane === undefined ? [] : laneChecks(deployment, lane)),
    ...blockChecks(deployment),
    ...tokenChecks(deployment),
  ]);
}

async function countedSince(
  before: Counted,
  length: number,
  { countedWithinMs = 1_000, prefill, decode }: VerifyOptions,
  clock: Clock,
): Promise<Counted> {
  const untilMs = clock.now() + countedWithinMs;
  for (;;) {
    const grown = growth(before, await readCounters({ prefill, decode }));
    const isCounted = moved(grown).transfers > 0 && promptTokens(grown.decode) >= length;
    if (isCounted || clock.now() > untilMs) return grown;
    await sleep(clock, POLL_MS);
  }
}
