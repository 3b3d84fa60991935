import { zmqSideChannel } from "@kv/connector";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { demoConnectors } from "../instance/connectors.js";
import { startInstance } from "../instance/instance.js";
import { readInstanceConfig } from "../instance/instance-config.js";
import { jsonLog, type LogLevel } from "./json-log.js";
import { runRole } from "./run-role.js";

/** One prefill or decode server over NIXL, in this process. `config` is JSON text (`InstanceConfigInput`). */
export async function runInstance({
  config,
  logLevel,
}: {
  config: string;
  logLevel: LogLevel;
}): Promise<void> {
  const settings = readInstanceConfig(parse(config));
  const log = jsonLog(logLevel, { instance: settings.name ?? settings.role, pid: process.pid });
  const registry = demoConnectors();
  await runRole(() =>
    startInstance(settings, {
      log,
      transport: nixlTransport({ log }),
      sideChannel: zmqSideChannel({ log }),
      resolveConnector: (transfer) => registry.resolve(transfer),
    }),
  );
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `--config is not JSON: ${(cause as Error).message}`, { cause });
  }
}
