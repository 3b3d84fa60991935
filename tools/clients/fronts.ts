import { createProxy } from "@kv/proxy";
import { startEnvoy } from "../envoy/envoy-process.js";
import { startPicker } from "../envoy/support/start-picker.js";
import type { Outcomes } from "./all-clients.js";

export interface Front {
  readonly url: string;
  inFlight(): number;
  close(): Promise<void>;
}

const pairing = { mode: "off" } as const;

/** `kv-proxy` in front of one P and one D. */
export async function startProxyFront(
  mode: "pull" | "push",
  prefill: string,
  decode: string,
): Promise<Front> {
  const proxy = createProxy({ mode, prefillers: [prefill], decoders: [decode], pairing });
  const { url } = await proxy.listen({ port: 0 });
  const inFlight = () => proxy.status().requests.in_flight;
  return { url, inFlight, close: () => proxy.close({ graceMs: 0 }) };
}

/** Envoy, which asks `kv-epp`, in front of a sidecar beside D. */
export async function startEnvoyFront(
  mode: "pull" | "push",
  prefill: string,
  decode: string,
): Promise<Front> {
  const sidecar = createProxy({
    mode,
    decoders: [decode],
    sidecar: { allow: ["127.0.0.1"] },
    pairing,
  });
  const endpoint = new URL((await sidecar.listen({ port: 0 })).url).host;
  const picker = await startPicker([
    "--pairing",
    "off",
    "--health-interval-ms",
    "200",
    "--prefill",
    new URL(prefill).host,
    "--decode",
    endpoint,
  ]);
  const envoy = await startEnvoy({
    pickerPort: picker.port,
    endpoints: [endpoint],
    failOpen: false,
  });
  return {
    url: envoy.url,
    inFlight: () => sidecar.status().requests.in_flight,
    async close() {
      await envoy.stop();
      await picker.kill();
      await sidecar.close({ graceMs: 0 });
    },
  };
}

/** Envoy takes no HTTP/1.0 as it is configured. */
export const NOT_BEHIND_ENVOY = ["HTTP/1.0"];
export const without = (names: readonly string[], all: Outcomes): Outcomes =>
  Object.fromEntries(
    Object.entries(all).map(([client, outcomes]) => [
      client,
      Object.fromEntries(Object.entries(outcomes).filter(([name]) => !names.includes(name))),
    ]),
  );
