import { once } from "node:events";
import { type AddressInfo, createServer } from "node:net";
import { systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { memoryNetwork, type SeededRandom } from "@kv/transport-memory";
import { FAKE_NIXL } from "../../packages/nixl/test/support/fake-nixl.js";
import type { FaultGround } from "../../packages/pull/test/fault-ground.js";
import { FAULT_RULES } from "../../packages/pull/test/fault-rules.js";
import { createSimEngine } from "../../packages/pull/test/sim-engine.js";
import { heldBy, REAL_TIMES, untilNothingHeld } from "./real-time.js";
import { createStrain } from "./strain.js";
import { type StrainedTransport, strainedTransport } from "./strained-transport.js";

export interface FakeGroundOptions {
  readonly backend: "UCX" | "LIBFABRIC";
  readonly random: SeededRandom;
}

/** Faults of the library itself, of a hundred transfers and notifications. */
const NATIVE_STRAINS = { failPost: 1, failStatus: 1, refuseRelease: 2, slow: 10, held: 1, deaf: 1 };
/** Libfabric gives errors of one peer to another's transfers; a WRITE of its is done when its bytes have left. */
const LIBFABRIC_STRAINS = { ...NATIVE_STRAINS, stray: 1, lateWrites: 2 };

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

/**
 * The addon over its stand-in for NIXL, all engines in one process, in real time. The stand-in knows the agents of its own process alone, so
 * an engine that dies is one whose steps end at once and whose agents vanish.
 */
export async function fakeGround(options: FakeGroundOptions): Promise<FaultGround> {
  const { backend, random } = options;
  const clock = systemClock();
  const strain = createStrain(random.fork("strain"));
  const strains = backend === "UCX" ? NATIVE_STRAINS : LIBFABRIC_STRAINS;
  const rules = FAULT_RULES.filter(({ operation }) => operation === "REQUEST");
  const network = memoryNetwork({ clock, faults: rules });
  const transports: StrainedTransport[] = [];
  const set = (name: (typeof SETTINGS)[number], value: number) => {
    process.env[`FAKE_NIXL_${name}`] = String(value);
  };
  // All of them before the first agent's thread reads one: from here on values change, and no place of the environment does.
  for (const name of SETTINGS) set(name, 0);
  const alive = createServer((socket) => socket.on("error", () => {})).unref();
  if (backend === "LIBFABRIC") {
    // Where peers of libfabric are seen to live.
    await once(alive.listen(0, "127.0.0.1"), "listening");
    process.env.FAKE_NIXL_ENDPOINT = String((alive.address() as AddressInfo).port);
  }

  // A peer's metadata that is refused for another's error is forgotten by NIXL itself, and not by its stand-in.
  let adding = 0;
  async function unstrayed<T>(add: () => Promise<T>): Promise<T> {
    adding += 1;
    set("STRAY_ERRORS", 0);
    try {
      return await add();
    } finally {
      adding -= 1;
    }
  }

  const native: Readonly<Record<keyof typeof LIBFABRIC_STRAINS, () => void>> = {
    failPost: () => set("FAIL_POST", 1),
    failStatus: () => set("FAIL_STATUS", 1),
    refuseRelease: () => set("REFUSE_RELEASE", 3),
    stray: () => set("STRAY_ERRORS", adding === 0 ? 1 : 0),
    lateWrites: () => set("LATE_WRITES", random.integer(2)),
    slow: () => set("POLLS", random.integer(4)),
    held() {
      set("HOLD", 1);
      clock.setTimer(() => set("HOLD", 0), HELD_MS);
    },
    deaf() {
      set("FAIL_NOTIFICATION", 1);
      clock.setTimer(() => set("FAIL_NOTIFICATION", 0), DEAF_MS);
    },
  };

  return {
    clock,
    async start({ layerwise, ...order }) {
      const library = nixlTransport({ library: FAKE_NIXL, backends: [backend] });
      const transport = strainedTransport(library, {
        clock,
        strain,
        before() {
          const kind = strain.draw("library", strains);
          if (kind !== undefined) native[kind]();
        },
        adding: unstrayed,
        lateMs: REAL_TIMES.longMs,
      });
      transports.push(transport);
      const options = { ...order, network, reportsLayers: layerwise, transport };
      const engine = await createSimEngine(options);
      return {
        ...engine,
        outstanding: () => ({ ...engine.outstanding(), transfers: heldBy(transport.agents).transfers }),
      };
    },
    see: (work) => work,
    async rest(engines) {
      strain.end();
      await untilNothingHeld(engines, clock);
    },
    async end() {
      for (const name of [...SETTINGS, "ENDPOINT"]) delete process.env[`FAKE_NIXL_${name}`];
      alive.close();
      const { listeners, requests } = network.outstanding();
      return { ...heldBy(transports.flatMap(({ agents }) => agents)), listeners, requests };
    },
    faultCounts: () => ({ ...strain.counts(), ...network.faultCounts() }),
  };
}
