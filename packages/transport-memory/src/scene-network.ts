import { memoryNetwork } from "./network/network.js";
import { memorySideChannel } from "./network/side-channel.js";
import { seededRandom } from "./simulation/seeded-random.js";
import { virtualClock } from "./simulation/virtual-clock.js";
import { memoryTransport } from "./transport.js";

/** Whatever takes longer never ends. */
const LIMIT_MS = 600_000;

/**
 * Creates a network in virtual time for `engineSuite` and `playScene` of `@kv/conformance/engine`.
 * An equal seed gives an equal run.
 */
export function sceneNetwork(seed: number | string) {
  const clock = virtualClock();
  const network = memoryNetwork({
    clock,
    random: seededRandom(seed),
    latency: { latencyMs: 1, jitterMs: 3, minPieces: 3, lingerMs: 4 },
  });
  return {
    clock,
    settle: <T>(work: Promise<T>): Promise<T> => clock.settle(work, { limitMs: LIMIT_MS }),
    advance: (ms: number): Promise<void> => clock.advance(ms),
    outstanding: (): Readonly<Record<string, number>> => ({
      ...network.outstanding(),
      timers: clock.pendingTimers,
    }),
    start(hostName: string) {
      const host = network.host(hostName);
      return {
        clock: host.clock,
        random: host.random,
        transport: memoryTransport({ network, host }),
        sideChannel: memorySideChannel({ network, host }),
        kill: () => host.kill(),
      };
    },
  };
}
