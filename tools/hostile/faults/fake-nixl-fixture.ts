import { createServer } from "node:net";
import { type Agent, systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import type { FaultFixture } from "@kv/testing/faults/fault-fixture";
import { FAULT_RULES } from "@kv/testing/faults/fault-rules";
import { listening } from "@kv/testing/http/listening";
import { FAKE_NIXL } from "@kv/testing/nixl/fake-nixl";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import { memoryNetwork, type SeededRandom } from "@kv/transport-memory";
import { FaultInjector, faultyTransport } from "./faulty.js";
import { heldBy, untilNothingHeld } from "./held-resources.js";

/** Faults of the fake NIXL library, per hundred transfers and notifications. */
const NATIVE_FAULTS = { failPost: 1, failStatus: 1, refuseRelease: 2, slow: 10, held: 1, deaf: 1 };
/** A WRITE completes when its bytes have left. */
const LIBFABRIC_FAULTS = { ...NATIVE_FAULTS, stray: 1, lateWrites: 2 };

const SETTINGS = [
  "POLLS",
  "HOLD",
  "FAIL_POST",
  "FAIL_STATUS",
  "REFUSE_RELEASE",
  "FAIL_NOTIFICATION",
  "STRAY_ERRORS",
  "LATE_WRITES",
] as const;
const HELD_MS = 100;
const DEAF_MS = 10;

const set = (name: (typeof SETTINGS)[number], value: number) => {
  process.env[`FAKE_NIXL_${name}`] = String(value);
};

/**
 * All engines in one process with the real clock. The fake knows only agents of its own process, so
 * a killed engine stops its steps and drops its agents.
 */
export async function fakeNixlFixture(
  backend: "UCX" | "LIBFABRIC",
  random: SeededRandom,
  lateMs: number,
): Promise<FaultFixture> {
  const clock = systemClock();
  const injector = new FaultInjector(random.fork("strain"));
  const chances = backend === "UCX" ? NATIVE_FAULTS : LIBFABRIC_FAULTS;
  const faults = FAULT_RULES.filter(({ operation }) => operation === "REQUEST");
  const network = memoryNetwork({ clock, faults });
  const agents: (readonly Agent[])[] = [];
  // Before the first agent's thread reads the environment: later calls move no entry.
  for (const name of SETTINGS) set(name, 0);
  const alive = createServer((socket) => socket.on("error", () => {})).unref();
  if (backend === "LIBFABRIC") {
    // The address at which the agent checks that a libfabric peer is alive.
    process.env.FAKE_NIXL_ENDPOINT = String(await listening(alive));
  }

  // The fake, unlike NIXL, does not forget a peer that it refused because of another peer's error.
  let adding = 0;
  async function withoutStrayErrors<T>(add: () => Promise<T>): Promise<T> {
    adding += 1;
    set("STRAY_ERRORS", 0);
    try {
      return await add();
    } finally {
      adding -= 1;
    }
  }

  const setFor = (name: (typeof SETTINGS)[number], forMs: number) => {
    set(name, 1);
    clock.setTimer(() => set(name, 0), forMs);
  };
  const native: Readonly<Record<keyof typeof LIBFABRIC_FAULTS, () => void>> = {
    failPost: () => set("FAIL_POST", 1),
    failStatus: () => set("FAIL_STATUS", 1),
    refuseRelease: () => set("REFUSE_RELEASE", 3),
    stray: () => set("STRAY_ERRORS", adding === 0 ? 1 : 0),
    lateWrites: () => set("LATE_WRITES", random.integer(2)),
    slow: () => set("POLLS", random.integer(4)),
    held: () => setFor("HOLD", HELD_MS),
    deaf: () => setFor("FAIL_NOTIFICATION", DEAF_MS),
  };

  return {
    clock,
    async start({ layerwise, ...order }) {
      const library = nixlTransport({ library: FAKE_NIXL, backends: [backend] });
      const transport = faultyTransport(library, {
        clock,
        injector,
        lateMs,
        before() {
          const kind = injector.draw("library", chances);
          if (kind !== undefined) native[kind]();
        },
        adding: withoutStrayErrors,
      });
      agents.push(transport.agents);
      const engine = await createSimEngine({
        ...order,
        network,
        reportsLayers: layerwise,
        transport,
      });
      const transfers = () => heldBy(transport.agents).transfers;
      return {
        ...engine,
        outstanding: () => ({ ...engine.outstanding(), transfers: transfers() }),
      };
    },
    settle: (work) => work,
    async waitUntilIdle(engines) {
      injector.hasEnded = true;
      await untilNothingHeld(engines, clock);
    },
    async countHeld() {
      for (const name of [...SETTINGS, "ENDPOINT"]) delete process.env[`FAKE_NIXL_${name}`];
      alive.close();
      const { listeners, requests } = network.outstanding();
      return { ...heldBy(agents.flat()), listeners, requests };
    },
    faultCounts: () => ({ ...injector.counts, ...network.faultCounts() }),
  };
}
