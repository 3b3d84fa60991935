import { type ConnectorModule, KvError, type KvTransferParams } from "@kv/interface";
import { type SeededRandom, seededRandom } from "@kv/transport-memory";
import { coordinatesOf } from "../simulator/sim-engine.js";
import { idSuffix } from "./fault-client.js";
import type { FaultEngine, FaultFixture } from "./fault-fixture.js";
import { closeAll, type Seat } from "./fault-run.js";
import { memoryFixture } from "./memory-fixture.js";

/** Restarts of one P and one D under load. */
export interface RestartLoad {
  readonly seed: string;
  readonly restarts: number;
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  /** Fraction of requests whose two legs start at once. */
  readonly atOnce?: number;
  /** Lease of P, in ms: a heartbeat is a sixth of it. */
  readonly leaseMs?: number;
  /** Longest time that a request may take, in ms. */
  readonly deadlineMs?: number;
}

/** What the restarts showed. */
export interface RestartReport {
  readonly restarts: number;
  /**
   * Wrong bytes, requests that did not end in time, errors without a code, first successes that
   * came too late. The first 10.
   */
  readonly violations: readonly string[];
  /** Requests by outcome: "ok", or the code of the error. */
  readonly outcomes: Readonly<Record<string, number>>;
  /**
   * From a new process's listening to the first request that succeeded, in ms: the slowest and the
   * median.
   */
  readonly firstSuccessMs: { readonly slowest: number; readonly median: number };
  readonly heartbeatMs: number;
  /** What is still held after all requests have ended, and after all engines are closed. */
  readonly left: Readonly<Record<string, number>>;
}

const CLIENTS = 4;
/**
 * A process dies at most so long after the first success at its predecessor's address, and starts
 * again so long after its death.
 */
const LIFE_MS = 250;
const DEATH_MS = 200;
const RETRY_MS = 10;
/** Heartbeats after which no success is expected any more. */
const GIVE_UP = 3;
const NUM_BLOCKS = 1024;

/** Restarts in virtual time on the memory transport. The same seed gives the same run. */
export function restartRun(load: RestartLoad): Promise<RestartReport> {
  const random = seededRandom(load.seed);
  return restartRunOn(
    memoryFixture({ random: random.fork("network"), rules: [], plainProducers: false }),
    load,
  );
}

/**
 * Kills P or D as SIGKILL does at random moments under load, and starts it again at the same
 * address: half of the times with its engine id, as an engine whose id is configured, and half with
 * another, as vLLM (vllm-project/vllm#49238, sgl-project/sglang#34289).
 */
export async function restartRunOn(
  fixture: FaultFixture,
  load: RestartLoad,
): Promise<RestartReport> {
  const { restarts, connector, atOnce = 0, leaseMs = 6000, deadlineMs = 30_000 } = load;
  const heartbeatMs = Math.floor(leaseMs / 6);
  const { clock } = fixture;
  const root = seededRandom(load.seed);
  const startedMs = clock.now();
  const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));
  const violations: string[] = [];
  const violation = (what: string) => {
    if (violations.length < 10)
      violations.push(`at ${(clock.now() - startedMs).toFixed(1)} ms: ${what}`);
  };
  const outcomes: Record<string, number> = {};
  const seat = { blockSize: 16, skewMs: 0, starts: 0, engine: undefined };
  const p: Seat = { ...seat, hostName: "p0", tpSize: 2 };
  const d: Seat = { ...seat, hostName: "d0", tpSize: 1 };
  let isRunning = true;
  let sent = 0;
  let lastError = "";

  async function start(seat: Seat, random: SeededRandom): Promise<void> {
    seat.starts += 1;
    const generation = random.next() < 0.5 ? 0 : seat.starts;
    const { hostName, tpSize, blockSize, skewMs } = seat;
    seat.engine = await fixture.start(
      {
        hostName,
        tpSize,
        blockSize,
        skewMs,
        numBlocks: NUM_BLOCKS,
        violation,
        engineId: `${hostName}-${generation}`,
        layerwise: false,
        receiveDeadlineMs: deadlineMs,
        extra: { kv_lease_duration: leaseMs / 1000, request_timeout: deadlineMs / 2000 },
        loadFailurePolicy: "fail",
        ...(connector === undefined ? {} : { connector }),
      },
      random,
    );
  }

  /**
   * One request, through the processes that run when its legs begin. Resolves to "ok", or to the
   * code of its error.
   */
  async function request(random: SeededRandom): Promise<string> {
    sent += 1;
    const id = `r${sent}`;
    const begunMs = clock.now();
    const prompt = { requestId: id, prompt: sent, numTokens: 1 + random.integer(80) };
    const outcome = await ended(() => bothLegs(prompt, random));
    outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
    const tookMs = clock.now() - begunMs;
    if (tookMs > deadlineMs + leaseMs)
      violation(`${id} ended only after ${tookMs.toFixed(0)} ms with ${outcome}`);
    return outcome;
  }

  async function bothLegs(
    prompt: { readonly requestId: string; readonly prompt: number; readonly numTokens: number },
    random: SeededRandom,
  ): Promise<unknown> {
    const { requestId } = prompt;
    const decode = (params: KvTransferParams, decodeId: string) =>
      alive(d).decode({ ...prompt, requestId: decodeId, params });
    if (random.next() >= atOnce) return decode(await alive(p).prefill(prompt), `d${requestId}`);
    const engine = alive(p);
    const [, decoded] = await Promise.allSettled([
      engine.prefill({ ...prompt, requestId: `cmpl-${requestId}-0-${idSuffix(random)}` }),
      decode(coordinatesOf(engine, requestId), `cmpl-${requestId}-0-${idSuffix(random)}`),
    ]);
    if (decoded.status === "rejected") throw decoded.reason;
    return decoded.value;
  }

  function alive({ engine, hostName }: Seat): FaultEngine {
    if (engine === undefined) throw new KvError("KV_PEER_DISCONNECTED", `${hostName} does not run`);
    return engine;
  }

  async function ended(work: () => Promise<unknown>): Promise<string> {
    try {
      await work();
      return "ok";
    } catch (error) {
      lastError = String(error);
      if (!KvError.is(error)) violation(`an error without a code: ${lastError}`);
      return KvError.is(error) ? error.code : "untyped";
    }
  }

  async function client(random: SeededRandom): Promise<void> {
    while (isRunning) {
      // As a router that sees which servers run: without a D, P would keep what it computes for a
      // lease.
      const isUp = p.engine !== undefined && d.engine !== undefined;
      if (!isUp || (await request(random)) !== "ok") await sleep(RETRY_MS);
      await sleep(random.next() * RETRY_MS);
    }
  }

  const waits: number[] = [];
  async function restartAll(random: SeededRandom): Promise<void> {
    for (let restart = 0; restart < restarts; restart++) {
      await sleep(random.next() * LIFE_MS);
      const seat = random.next() < 0.5 ? p : d;
      const { engine } = seat;
      seat.engine = undefined;
      await engine?.kill();
      await sleep(random.next() * DEATH_MS);
      await start(seat, random);
      const listeningMs = clock.now();
      const lastMs = listeningMs + GIVE_UP * heartbeatMs;
      while ((await request(random)) !== "ok" && clock.now() < lastMs) await sleep(RETRY_MS);
      const waitedMs = clock.now() - listeningMs;
      waits.push(waitedMs);
      if (waitedMs > heartbeatMs)
        violation(
          `restart ${restart} of ${seat.hostName}: the first success came after ${waitedMs.toFixed(0)} ms; the last error: ${lastError}`,
        );
    }
    isRunning = false;
  }

  await fixture.settle(Promise.all([start(p, root.fork("p")), start(d, root.fork("d"))]));
  const clients = Array.from({ length: CLIENTS }, (_, i) => client(root.fork(`client ${i}`)));
  await fixture.settle(Promise.all([restartAll(root.fork("restarts")), ...clients]));
  const left = await closeAll(fixture, [p, d]);
  waits.sort((a, b) => a - b);
  return {
    restarts: waits.length,
    violations,
    outcomes,
    firstSuccessMs: { slowest: waits.at(-1) ?? 0, median: waits[waits.length >> 1] ?? 0 },
    heartbeatMs,
    left,
  };
}
