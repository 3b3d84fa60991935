import { KvError, type WorkerOptions } from "@kv/interface";

/**
 * Refuses what the connector does not work with. Errors: `KV_TRANSPORT_UNSUPPORTED`,
 * `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function checkWorkerOptions(options: WorkerOptions, connector: CheckedConnector): void {
  checkTransport(options, connector);
  checkPlatform(options);
  checkPipelineStages(options);
}

interface CheckedConnector {
  readonly name: string;
  readonly operation: "read" | "write";
  readonly transferMode: "pull" | "push";
}

function checkTransport({ transport }: WorkerOptions, { name, operation }: CheckedConnector): void {
  const { capabilities } = transport;
  if (capabilities[operation] && capabilities.notifications) return;
  const missing = capabilities[operation] ? "notifications" : `${operation.toUpperCase()}s`;
  throw new KvError(
    "KV_TRANSPORT_UNSUPPORTED",
    `${name} needs ${operation.toUpperCase()}s and notifications; transport ${transport.name} has no ${missing}`,
    { hint: "use a transport whose capabilities include both, such as @kv/nixl" },
  );
}

function checkPlatform({ config, platform }: WorkerOptions): void {
  const { bufferDevices } = platform.capabilities;
  if (config.bufferDevice !== undefined && !bufferDevices.includes(config.bufferDevice)) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `kv_buffer_device is ${JSON.stringify(config.bufferDevice)}; platform ${platform.deviceType} has ${bufferDevices.join(", ")}`,
      { hint: `leave kv_buffer_device out for ${bufferDevices[0]}` },
    );
  }
  if (platform.createStaging !== undefined) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `memory of platform ${platform.deviceType} cannot be registered directly: its blocks are staged`,
      { hint: "put staged() of @kv/connector around the connector" },
    );
  }
}

function checkPipelineStages({ config, engine: { ppSize } }: WorkerOptions): void {
  if (ppSize === 1) return;
  if (config.role === "kv_consumer") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_role is "kv_consumer" and this engine has ${ppSize} pipeline stages: notifications are counted for each tensor-parallel rank of D, not for each stage`,
      { hint: "use pipeline_parallel_size 1 for decode workers" },
    );
  }
}
