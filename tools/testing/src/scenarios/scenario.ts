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
import { expect } from "vitest";
import { createSimEngine, outcomeOf, type SimEngine } from "../simulator/sim-engine.js";
import type { SimEngineOptions, SimRequest } from "../simulator/sim-options.js";

/** A memory network in virtual time, and the engines on it. */
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
  const events: [host: string, event: string, fields: LogFields][] = [];
  const engines: SimEngine[] = [];

  const outcome = (work: Promise<unknown>): Promise<string> => clock.settle(outcomeOf(work));

  /** Closes the living engines later. Returns the violations, and what is held before and after. */
  async function close(afterMs: number): Promise<readonly string[]> {
    await clock.advance(afterMs);
    const found = violations.splice(0);
    const look = (where: string, counts: Readonly<Record<string, number>>) => {
      for (const [name, count] of Object.entries(counts))
        if (count !== 0) found.push(`${where}: ${count} ${name} are left`);
    };
    const living = engines.filter(({ alive }) => alive);
    for (const engine of living) look(engine.host.name, engine.outstanding());
    await clock.settle(Promise.all(living.map((engine) => engine.close())));
    await clock.advance(10_000);
    look("network", { ...network.outstanding(), timers: clock.pendingTimers });
    return found;
  }

  return {
    clock,
    network,
    violations,
    sleep: (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms)),
    /** Total over all connectors of a host. `METRICS` has vLLM's metric names. */
    counted: (hostName: string, name: keyof typeof METRICS) =>
      metrics.get(hostName)?.total(METRICS[name]) ?? 0,
    logged: (hostName: string, event: string) =>
      events
        .filter(([host, logged]) => host === hostName && logged === event)
        .map(([, , fields]) => fields),
    async engine(hostName: string, options: Partial<SimEngineOptions> = {}): Promise<SimEngine> {
      const own = metrics.get(hostName) ?? memoryMetrics();
      metrics.set(hostName, own);
      const log = (event: string, fields: LogFields = {}) =>
        void events.push([hostName, event, fields]);
      const engine = await clock.settle(
        createSimEngine({
          network,
          hostName,
          engineId: hostName,
          tpSize: 1,
          blockSize: 16,
          numBlocks: 64,
          metrics: own,
          log: { debug: log, info: log, warn: log, error: log },
          violation: (what) => void violations.push(what),
          ...(connector === undefined ? {} : { connector }),
          ...options,
        }),
      );
      engines.push(engine);
      return engine;
    },
    /** An agent of no engine, after a handshake with the one that the parameters name. */
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
    /** `p` prefills a prompt, and `d` decodes it. Returns the outcome at `d`. */
    async handedOver(
      p: SimEngine,
      d: SimEngine,
      n = 1,
      change: Partial<SimRequest> = {},
    ): Promise<string> {
      const params = await clock.settle(p.prefill(prompt(n)));
      return await outcome(d.decode({ ...prompt(n), params, ...change }));
    },
    close,
    async end(afterMs = 100_000): Promise<void> {
      expect(await close(afterMs)).toEqual([]);
    },
  };
}

export const prompt = (n: number, numTokens = 40) => ({ requestId: `r${n}`, prompt: n, numTokens });
