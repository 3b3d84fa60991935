import type { Instance, Pairing } from "@kv/fleet";
import type { GenerationRequest, UpstreamAnswer } from "@kv/fleet/front-end";
import { checkRemotePrefillParams } from "@kv/protocol";
import { rawMember } from "../request/json-members.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { endedVisit, type LegAnswer } from "./leg-answer.js";

type Fields = Readonly<Record<string, unknown>>;

/** How a prefill leg ended. */
export type PrefillOutcome = PrefilledKv | PrefillWithoutKv | PrefillError;

/** The prompt is computed, and a decode worker can get its KV. */
export interface PrefilledKv {
  readonly kind: "kv";
  readonly instance: Instance;
  /** JSON text of the parameters by which a decode worker finds the KV. */
  readonly kvTransferParams: string;
  /** The whole answer. */
  readonly fields: Fields;
  /** When the answer was there, on the proxy's clock. The lease of the blocks began before. */
  readonly atMs: number;
}

/** The prompt is computed, but the worker keeps no KV for a decode worker. */
export interface PrefillWithoutKv {
  readonly kind: "no-kv";
  readonly instance: Instance;
}

/** The worker answered with an error, which is for the client. */
export interface PrefillError {
  readonly kind: "error";
  readonly instance: Instance;
  readonly answer: LegAnswer;
}

/** Reads a prefill worker's complete answer. Errors: `KV_PROXY_UPSTREAM_FAILED` for an answer that no decode worker could use. */
export function readPrefillAnswer(
  instance: Instance,
  answer: UpstreamAnswer,
  body: Buffer,
  atMs: number,
): PrefillOutcome {
  const { url } = instance;
  const { status, headers, discard } = answer;
  if (status >= 400) {
    const visit = endedVisit(instance);
    const error = { visit, status, headers, eventStream: false, onePart: true, held: body, rest: undefined };
    return { kind: "error", instance, answer: { ...error, discard } };
  }
  if (status !== 200)
    throw badAnswer("prefill", url, `answered with status ${status}, which the proxy does not follow`);
  const text = body.toString("utf8");
  const fields = parseObject(url, text, body.length);
  const { kv_transfer_params: params } = fields;
  // With any other value than `true`, a decode worker would compute the prompt itself without an error.
  const hasKv =
    typeof params === "object" &&
    params !== null &&
    "do_remote_prefill" in params &&
    params.do_remote_prefill === true;
  const kvTransferParams = hasKv ? rawMember(text, "kv_transfer_params") : undefined;
  if (kvTransferParams === undefined) return { kind: "no-kv", instance };
  const problem = checkRemotePrefillParams(params as Fields);
  if (problem !== undefined)
    throw badAnswer(
      "prefill",
      url,
      `answered kv_transfer_params that no decode worker could use: ${problem.message}`,
    );
  return { kind: "kv", instance, kvTransferParams, fields, atMs };
}

/** A decode worker's answer, with the prefill worker's where the client is to get log probabilities of the prompt. */
export function withPromptAnswer(
  answer: LegAnswer,
  { promptFields }: GenerationRequest,
  { fields }: PrefilledKv,
): LegAnswer {
  return promptFields === "none" || answer.status !== 200 ? answer : { ...answer, promptAnswer: fields };
}

function parseObject(url: string, text: string, lengthBytes: number): Fields {
  let fields: unknown;
  try {
    fields = JSON.parse(text);
  } catch (cause) {
    const problem = `answered 200 with a body that is not JSON (${lengthBytes} bytes)`;
    throw badAnswer("prefill", url, problem, cause);
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields))
    throw badAnswer("prefill", url, "answered 200 with JSON that is not an object");
  return fields as Fields;
}

/** Where decode engines reach the engine of a prefill instance, for push. */
export interface EngineCoordinates {
  /** vLLM's `engine_id`, which is new with each start of the engine. */
  readonly engineId: string;
  /** Host of its side channel. */
  readonly host: string;
  /** Port of its side channel. */
  readonly port: number;
  /** Its tensor-parallel size. */
  readonly tpSize: number;
}

interface Learned {
  readonly mode: "pull" | "push";
  readonly coordinates: EngineCoordinates | undefined;
}

/** vLLM's default of VLLM_NIXL_SIDE_CHANNEL_PORT. */
const DEFAULT_PORT = 5600;

/** The engines of prefill instances: from their configuration and, preferred, from the last `kv_transfer_params` that each has answered. */
export class PrefillEngines {
  readonly #pairing: Pairing | undefined;
  readonly #learned = new WeakMap<Instance, Learned>();

  /** `pairing` is told which engines answer. */
  constructor(pairing?: Pairing) {
    this.#pairing = pairing;
  }

  /** Undefined while the engine's id is not known. */
  coordinatesOf(instance: Instance): EngineCoordinates | undefined {
    const learned = this.#learned.get(instance)?.coordinates;
    if (learned !== undefined) return learned;
    const { kv, url } = instance;
    if (kv?.engineId === undefined) return undefined;
    return {
      engineId: kv.engineId,
      host: kv.host ?? new URL(url).hostname.replace(/^\[|\]$/g, ""),
      port: kv.port ?? DEFAULT_PORT,
      tpSize: kv.tpSize ?? 1,
    };
  }

  /** Whether the engine's connector pulls or pushes (`transfer_mode`, vLLM 0.32 and 0.33); undefined before its first answer. */
  modeOf(instance: Instance): "pull" | "push" | undefined {
    return this.#learned.get(instance)?.mode;
  }

  /** Records the `kv_transfer_params` of an instance's answer, and returns the coordinates in them. */
  learn({ instance, fields }: PrefilledKv): EngineCoordinates | undefined {
    const params = fields.kv_transfer_params as Readonly<Record<string, unknown>>;
    const mode = params.transfer_mode === "push" ? "push" : "pull";
    const found = coordinatesIn(params);
    const coordinates = found ?? this.#learned.get(instance)?.coordinates;
    this.#learned.set(instance, { mode, coordinates });
    return found;
  }

  /**
   * Passes the engine of an instance's last answer on to pairing. Resolves when its side channel was read, where it is another engine than before;
   * undefined where nothing is to be waited for.
   */
  confirm(instance: Instance): Promise<void> | undefined {
    const learned = this.#learned.get(instance);
    if (this.#pairing === undefined || learned?.coordinates === undefined) return undefined;
    const { engineId, host, port, tpSize } = learned.coordinates;
    return this.#pairing.answered(instance, { engineId, host, port, tpSize, mode: learned.mode });
  }
}

function coordinatesIn(params: Readonly<Record<string, unknown>>): EngineCoordinates | undefined {
  const { remote_engine_id: engineId, remote_host: host, remote_port: port, tp_size: tpSize } = params;
  if (typeof engineId !== "string" || typeof host !== "string" || typeof port !== "number") return undefined;
  return { engineId, host, port, tpSize: typeof tpSize === "number" ? tpSize : 1 };
}

/** JSON text of the `kv_transfer_params` for a decode leg that is sent together with the prefill leg (vLLM 0.33, push). It has no blocks yet. */
export function registrationParams(
  { engineId, host, port, tpSize }: EngineCoordinates,
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
