import type { Instance } from "./instance.js";

/** Where a prefill instance's engine is met by decode workers: what they must know before it has answered. */
export interface KvCoordinates {
  readonly engineId: string;
  readonly host: string;
  /** Of its side channel. */
  readonly port: number;
  readonly tpSize: number;
}

/** What is known of the prefill instances: from flags, a configuration or `/instances/add`, and better, from their own answers. */
export interface CoordinatesBook {
  /** Undefined while its engine's id is not known. */
  of(instance: Instance): KvCoordinates | undefined;
  /** From the `kv_transfer_params` of an answer, JSON text; an engine has a new id with each start, so the last word counts. */
  learn(instance: Instance, kvTransferParams: string): KvCoordinates | undefined;
}

/** vLLM's VLLM_NIXL_SIDE_CHANNEL_PORT. */
const DEFAULT_PORT = 5600;

export function createCoordinatesBook(): CoordinatesBook {
  const learned = new WeakMap<Instance, KvCoordinates>();
  return {
    of(instance) {
      const known = learned.get(instance);
      if (known !== undefined) return known;
      const { kv, url } = instance;
      if (kv?.engineId === undefined) return undefined;
      return {
        engineId: kv.engineId,
        host: kv.host ?? new URL(url).hostname.replace(/^\[|\]$/g, ""),
        port: kv.port ?? DEFAULT_PORT,
        tpSize: kv.tpSize ?? 1,
      };
    },
    learn(instance, kvTransferParams) {
      const { remote_engine_id, remote_host, remote_port, tp_size } = JSON.parse(kvTransferParams) as Record<
        string,
        unknown
      >;
      if (typeof remote_engine_id !== "string" || typeof remote_host !== "string") return undefined;
      if (typeof remote_port !== "number") return undefined;
      const coordinates: KvCoordinates = {
        engineId: remote_engine_id,
        host: remote_host,
        port: remote_port,
        tpSize: typeof tp_size === "number" ? tp_size : 1,
      };
      learned.set(instance, coordinates);
      return coordinates;
    },
  };
}

/** What asks a prefill worker to write the KV into the decode worker. */
export const ASK_FOR_PUSH =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null,"transfer_mode":"push"}';

/** What a decode worker is told where both legs go out at once (vLLM 0.33, push): no blocks, for there are none yet. */
export function coordinatesParams(
  { engineId, host, port, tpSize }: KvCoordinates,
  requestId: string,
): string {
  return JSON.stringify({
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_engine_id: engineId,
    remote_request_id: requestId,
    remote_host: host,
    remote_port: port,
    tp_size: tpSize,
    transfer_mode: "push",
  });
}
