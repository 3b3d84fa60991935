import { type ConnectorModule, KvError } from "@kv/interface";
import { type SeededRandom, seededRandom } from "@kv/transport-memory";
import { coordinatesOf } from "../simulator/sim-engine.js";
import type { EngineRequest } from "../simulator/sim-options.js";
import { type FaultFixture, memoryFixture } from "./fault-fixture.js";
import { idSuffix, type Seat, Seats, seat } from "./seats.js";

export interface RestartLoad {
  readonly seed: string;
  readonly restarts: number;
  readonly connector?: ConnectorModule;
  readonly atOnce?: number;
  /** A heartbeat is a sixth of it. */
  readonly leaseMs?: number;
  readonly deadlineMs?: number;
}

const CLIENTS = 4;
/** At most, after the first success. */
const LIFE_MS = 250;
/** At most. */
const DEATH_MS = 200;
const RETRY_MS = 10;
const GIVE_UP = 3;
const NUM_BLOCKS = 1024;

export function restartRun(load: RestartLoad) {
  return restartRunOn(memoryFixture(seededRandom(load.seed).fork("network"), {}), load);
}

/**
 * Kills P or D at random moments under load, and starts it again at its address: half of the times
 * with another engine id, as vLLM (vllm-project/vllm#49238, sgl-project/sglang#34289).
 */
export async function restartRunOn(fixture: FaultFixture, load: RestartLoad) {
  const { restarts, connector, atOnce = 0, leaseMs = 6000, deadlineMs = 30_000 } = load;
  const heartbeatMs = Math.floor(leaseMs / 6);
  const { clock } = fixture;
  const root = seededRandom(load.seed);
  const seats = new Seats(fixture, {
    numBlocks: NUM_BLOCKS,
    receiveDeadlineMs: deadlineMs,
    extra: { kv_lease_duration: leaseMs / 1000, request_timeout: deadlineMs / 2000 },
    connector,
  });
  const { sleep } = seats;
  const [p, d] = [seat("p0", 2), seat("d0", 1)];
  let isRunning = true;
  let sent = 0;
  let lastError = "";

  async function request(random: SeededRandom): Promise<string> {
    sent += 1;
    const begunMs = clock.now();
    const prompt = { requestId: `r${sent}`, prompt: sent, numTokens: 1 + random.integer(80) };
    const outcome = await seats.outcomeOf(
      bothLegs(prompt, random).catch((error: unknown) => {
        lastError = String(error);
        throw error;
      }),
    );
    seats.ended(outcome);
    const tookMs = clock.now() - begunMs;
    if (tookMs > deadlineMs + leaseMs)
      seats.violation(
        `${prompt.requestId} ended only after ${tookMs.toFixed(0)} ms with ${outcome}`,
      );
    return outcome;
  }

  async function bothLegs(prompt: EngineRequest, random: SeededRandom): Promise<unknown> {
    const { requestId } = prompt;
    if (random.next() >= atOnce) {
      const params = await alive(p).prefill(prompt);
      return alive(d).decode({ ...prompt, requestId: `d${requestId}`, params });
    }
    const engine = alive(p);
    const params = coordinatesOf(engine, requestId);
    const legId = () => `cmpl-${requestId}-0-${idSuffix(random)}`;
    const [, decoded] = await Promise.allSettled([
      engine.prefill({ ...prompt, requestId: legId() }),
      (async () => alive(d).decode({ ...prompt, requestId: legId(), params }))(),
    ]);
    if (decoded.status === "rejected") throw decoded.reason;
    return decoded.value;
  }

  function alive({ engine, hostName }: Seat) {
    if (engine === undefined) throw new KvError("KV_PEER_DISCONNECTED", `${hostName} does not run`);
    return engine;
  }

  async function client(random: SeededRandom) {
    while (isRunning) {
      // As a router that sees which servers run.
      const isUp = p.engine !== undefined && d.engine !== undefined;
      if (!isUp || (await request(random)) !== "ok") await sleep(RETRY_MS);
      await sleep(random.next() * RETRY_MS);
    }
  }

  const waits: number[] = [];
  async function restartAll(random: SeededRandom) {
    for (let restart = 0; restart < restarts; restart++) {
      await sleep(random.next() * LIFE_MS);
      const place = random.next() < 0.5 ? p : d;
      await seats.kill(place);
      await sleep(random.next() * DEATH_MS);
      await seats.start(place, random);
      const listeningMs = clock.now();
      const lastMs = listeningMs + GIVE_UP * heartbeatMs;
      while ((await request(random)) !== "ok" && clock.now() < lastMs) await sleep(RETRY_MS);
      const waitedMs = clock.now() - listeningMs;
      waits.push(waitedMs);
      if (waitedMs > heartbeatMs)
        seats.violation(
          `restart ${restart} of ${place.hostName}: the first success came after ${waitedMs.toFixed(0)} ms; the last error: ${lastError}`,
        );
    }
    isRunning = false;
  }

  await fixture.settle(
    Promise.all([seats.start(p, root.fork("p")), seats.start(d, root.fork("d"))]),
  );
  const clients = Array.from({ length: CLIENTS }, (_, i) => client(root.fork(`client ${i}`)));
  await fixture.settle(Promise.all([restartAll(root.fork("restarts")), ...clients]));
  const left = await seats.close([p, d]);
  waits.sort((a, b) => a - b);
  const { violations, outcomes } = seats;
  /** From a new process's listening to the first request that succeeded. */
  const firstSuccessMs = { slowest: waits.at(-1) ?? 0, median: waits[waits.length >> 1] ?? 0 };
  return { restarts: waits.length, violations, outcomes, firstSuccessMs, heartbeatMs, left };
}
