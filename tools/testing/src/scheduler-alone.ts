import { readTransferConfig } from "@kv/connector";
import type { KvCacheConfig, LogFields, SchedulerConnector, SchedulerOptions } from "@kv/interface";
import { silentLog } from "@kv/interface";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { engineIdentity } from "./engine-identity.js";
import { manualClock } from "./manual-clock.js";
import { leavesNothing } from "./nothing-left.js";
import { simConfig } from "./simulator/sim-options.js";

/** The scheduler side of engine `e` without workers; a test ends by closing it. */
export function schedulerAlone<Scheduler extends SchedulerConnector>(
  create: (options: SchedulerOptions) => Scheduler,
  {
    cache = simConfig(16),
    extra = {},
    role = "kv_both",
    ppSize = 1,
  }: {
    readonly cache?: KvCacheConfig;
    readonly extra?: Readonly<Record<string, unknown>>;
    readonly role?: string;
    readonly ppSize?: number;
  } = {},
) {
  const clock = manualClock(1000);
  const network = memoryNetwork({ clock });
  const warned: [event: string, fields: LogFields | undefined][] = [];
  const scheduler = create({
    config: {
      ...readTransferConfig({
        kv_connector: "x",
        kv_role: role,
        kv_connector_extra_config: extra,
      }),
      sideChannelHost: "here",
    },
    engine: engineIdentity("e", { ppSize }),
    cache,
    sideChannel: memorySideChannel({ network, host: "here" }),
    clock,
    log: { ...silentLog, warn: (event, fields) => void warned.push([event, fields]) },
  });
  leavesNothing(
    () => ({
      ...scheduler.outstanding(),
      ...network.outstanding(),
      timers: clock.pending(),
      orders: Number(scheduler.hasPendingWork()),
    }),
    () => scheduler.close(),
  );
  return { scheduler, clock, warned };
}
