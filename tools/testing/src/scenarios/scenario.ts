import { METRICS, type MemoryMetrics, memoryMetrics } from "@kv/connector";
import type { ConnectorModule, KvTransferParams, LogFields } from "@kv/interface";
import { decodeAgentMetadata, decodeHandshakeReply, encodeHandshakeRequest } from "@kv/protocol";
import {
  type FaultRule,
  memoryNetwork,
  memorySideChannel,
  memoryTransport,
  type SeededRandom,
  seededRandom,
  virtualClock,
} from "@kv/transport-memory";
import { expect, onTestFinished } from "vitest";
import { held } from "../nothing-left.js";
import { recordedLog } from "../recorded-log.js";
import { createSimEngine, outcomeOf, type SimEngine } from "../simulator/sim-engine.js";
import type { EngineRequest, SimEngineOptions } from "../simulator/sim-options.js";

export function createScenario({
  faults = [],
  connector,
  random = seededRandom("scenario"),
  jitterMs = 0,
}: {
  faults?: readonly FaultRule[];
  connector?: ConnectorModule | undefined;
  random?: SeededRandom;
  jitterMs?: number;
} = {}) {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random,
    latency: { latencyMs: 1, jitterMs, minPieces: 3, lingerMs: 4 },
    faults,
  });
  const violations: string[] = [];
  const metrics = new Map<string, MemoryMetrics>();
  const logs = new Map<string, ReturnType<typeof recordedLog>>();
  const engines: SimEngine[] = [];

  const outcome = (work: Promise<unknown>): Promise<string> => clock.settle(outcomeOf(work));

  /** The parameters for D. */
  const prefilled = (p: SimEngine, n = 1, change: Partial<EngineRequest> = {}) =>
    clock.settle(p.prefill({ ...prompt(n), ...change }));

  /** The outcome of a request at D. */
  const decoded = (
    d: SimEngine,
    params: KvTransferParams = {},
    n = 1,
    change: Partial<EngineRequest> = {},
  ): Promise<string> => outcome(d.decode({ ...prompt(n), params, ...change }));

  /** The outcome at `d` of a prompt that `p` prefills. */
  async function handedOver(
    p: SimEngine,
    d: SimEngine,
    n = 1,
    change: Partial<EngineRequest> = {},
  ): Promise<string> {
    return decoded(d, await prefilled(p, n), n, change);
  }

  let isOver = false;

  /** Returns the violations, and what is held before and after. */
  async function close(afterMs: number): Promise<readonly string[]> {
    isOver = true;
    await clock.advance(afterMs);
    const found = violations.splice(0);
    const look = (where: string, counts: Readonly<Record<string, number>>) => {
      for (const [name, count] of Object.entries(held(counts)))
        found.push(`${where}: ${count} ${name} are left`);
    };
    const living = engines.filter(({ alive }) => alive);
    for (const engine of living) look(engine.host.name, engine.outstanding());
    await clock.settle(Promise.all(living.map((engine) => engine.close())));
    await clock.advance(10_000);
    look("network", { ...network.outstanding(), timers: clock.pendingTimers });
    return found;
  }

  async function end(afterMs = 100_000): Promise<void> {
    expect(await close(afterMs)).toEqual([]);
  }
  // A test that does not call it looks for what is left, too.
  if (expect.getState().currentTestName !== undefined)
    onTestFinished(async () => {
      if (!isOver) await end();
    });

  return {
    clock,
    network,
    violations,
    sleep: (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms)),
    /** Over all connectors of a host. */
    counted: (hostName: string, name: keyof typeof METRICS) =>
      metrics.get(hostName)?.total(METRICS[name]) ?? 0,
    logged: (hostName: string, event: string): LogFields[] =>
      logs.get(hostName)?.logged(event) ?? [],
    async engine(hostName: string, options: Partial<SimEngineOptions> = {}): Promise<SimEngine> {
      const own = metrics.get(hostName) ?? memoryMetrics();
      metrics.set(hostName, own);
      const recorded = logs.get(hostName) ?? recordedLog();
      logs.set(hostName, recorded);
      const engine = await clock.settle(
        createSimEngine({
          network,
          hostName,
          engineId: hostName,
          tpSize: 1,
          blockSize: 16,
          numBlocks: 64,
          metrics: own,
          log: recorded.log,
          violation: (what) => void violations.push(what),
          ...(connector === undefined ? {} : { connector }),
          ...options,
        }),
      );
      engines.push(engine);
      return engine;
    },
    /** Engines "p" and "d". */
    async pair(p: Partial<SimEngineOptions> = {}, d: Partial<SimEngineOptions> = {}) {
      return { p: await this.engine("p", p), d: await this.engine("d", d) };
    },
    /** What comes of work that takes less than this time. */
    async within<T>(limitMs: number, work: Promise<T>): Promise<T> {
      const startedMs = clock.now();
      const result = await work;
      expect(clock.now() - startedMs).toBeLessThan(limitMs);
      return result;
    },
    /** Expects that the engine keeps the blocks of no request. */
    async frees(engine: SimEngine, afterMs = 50): Promise<void> {
      await clock.advance(afterMs);
      expect(engine.outstanding().kept).toBe(0);
    },
    /** Expects this outcome of the work. */
    async ends(work: Promise<unknown>, expected = "ok"): Promise<void> {
      expect(await outcome(work)).toBe(expected);
    },
    /** An agent of no engine, after a handshake. */
    async stranger(hostName: string, params: KvTransferParams) {
      const transport = memoryTransport({ network, host: hostName });
      const sideChannel = memorySideChannel({ network, host: hostName });
      const agent = await transport.createAgent();
      const { frames } = await clock.settle(
        sideChannel.request({
          host: String(params.remote_host),
          port: Number(params.remote_port),
          frames: [encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })],
          timeoutMs: 1000,
        }),
      );
      const { agentMetadata } = decodeAgentMetadata(
        decodeHandshakeReply(frames).payload.agentMetadataBytes,
      );
      const remote = await agent.addRemote(agentMetadata);
      return {
        notify: (payload: Uint8Array) => agent.notify(remote, payload),
        async close() {
          await transport.close();
          await sideChannel.close();
        },
      };
    },
    outcome,
    prefilled,
    decoded,
    handedOver,
    /** Expects that `p` prefills a prompt, and `d` decodes it. */
    async serves(...pair: Parameters<typeof handedOver>): Promise<void> {
      expect(await handedOver(...pair)).toBe("ok");
    },
    close,
    end,
    [Symbol.asyncDispose]: end,
  };
}

/** Work whose outcome nobody may look at. */
export function started<T>(work: Promise<T>): Promise<T> {
  work.catch(() => {});
  return work;
}

export const prompt = (n: number, numTokens = 40) => ({ requestId: `r${n}`, prompt: n, numTokens });
