import { KvError, type Timer } from "@kv/interface";
import type { Instance, Role } from "../instances/instance.js";
import type { PairCheck } from "./check-pair.js";
import { type EngineFacts, modeIn, type SideChannelAddress } from "./engine-facts.js";

/** Time until a side channel that could not be read is read again, at first. */
export const FIRST_RETRY_MS = 1000;
const DEFAULT_PORT = 5600;
/** Engines that answer under one URL, such as the ranks of a data-parallel server. */
const MAX_ENGINES = 16;

/** An instance as pairing sees it. */
export interface PairedInstance extends Instance {
  readonly draining: boolean;
  /** Whether it is neither draining, ejected nor cooling down. */
  available(): boolean;
}

/**
 * The prefill instance that a decode instance is to fit; for a prefill instance, that there is to
 * be any decode instance that it fits.
 */
export type Partner = Instance | AnyPartner;

/** Any decode instance that takes requests. */
export interface AnyPartner {
  /** Decode instances that count only where there is no other. */
  readonly avoiding: ReadonlySet<Instance>;
}

/** The engine of a prefill instance, as an answer's `kv_transfer_params` name it. */
export interface AnsweredEngine {
  readonly engineId: string;
  /** `remote_host`: the host of its side channel. */
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  readonly mode: "pull" | "push";
}

/**
 * Instances of one role that are alike in all that decides which others they fit: fleets have many
 * instances of few kinds.
 */
export interface Kind {
  readonly key: string;
  readonly id: number;
  readonly entries: Set<Entry>;
  readonly checks: Map<Kind, PairCheck>;
}

/** What is known about one instance. */
export class Entry {
  facts: EngineFacts | undefined = undefined;
  /** Another instance, whose engine has the same id. */
  namesake: Instance | undefined = undefined;
  cameAt = 0;
  readonly engines = new Map<string, EngineFacts>();
  answered: AnsweredEngine | undefined = undefined;
  /** The engine may be another one since the facts were read. */
  stale = false;
  error: KvError | undefined = undefined;
  reading: Promise<void> | undefined = undefined;
  searching = false;
  timer: Timer | undefined = undefined;
  delayMs = FIRST_RETRY_MS;
  readAtMs = Number.NEGATIVE_INFINITY;
  /** Those that fit the same instances. Undefined until its first check. */
  kind: Kind | undefined = undefined;
  logged = "";

  readonly origin: string;

  constructor(readonly instance: PairedInstance) {
    this.origin = new URL(instance.url).origin;
  }

  get address(): SideChannelAddress | undefined {
    const { kv, url } = this.instance;
    const host = new URL(url).hostname.replace(/^\[|\]$/g, "");
    if (kv?.host !== undefined || kv?.port !== undefined || kv?.engineId !== undefined)
      return { host: kv.host ?? host, port: kv.port ?? DEFAULT_PORT };
    if (this.answered === undefined) return undefined;
    const { host: announced, port } = this.answered;
    // What an engine calls itself on its own host is another host here.
    return { host: isOwnHost(announced) && !isOwnHost(host) ? host : announced, port };
  }

  /** It is not known which engine it has now: that is being found out. */
  get isUnsure(): boolean {
    return this.stale || (this.facts === undefined && this.reading !== undefined);
  }

  /** Takes the facts as those of the instance, with what its configuration and its answers add. */
  adopt(facts: EngineFacts): void {
    const { answered, instance, engines } = this;
    const own =
      answered !== undefined && sameEngine(answered.engineId, facts.engineId)
        ? answered
        : undefined;
    const before = engines.get(facts.engineId);
    const isSame = before?.compatibilityHash === facts.compatibilityHash;
    const factors = facts.factors ?? (isSame ? before?.factors : undefined);
    this.facts = {
      ...facts,
      factors,
      tpSize: instance.kv?.tpSize ?? own?.tpSize ?? facts.tpSize,
      mode: modeIn(factors) ?? own?.mode ?? facts.mode,
    };
    this.stale = false;
    engines.delete(facts.engineId);
    engines.set(facts.engineId, this.facts);
    const [oldest] = engines.keys();
    if (engines.size > MAX_ENGINES && oldest !== undefined) engines.delete(oldest);
  }
}

/** Whether it is known which engine the instance has, and the instance takes requests. */
export function isReady(entry: Entry): boolean {
  return !entry.isUnsure && entry.instance.available();
}

/** The ranks of a data-parallel server are engines of one configuration: `ID_dp0`, `ID_dp1`. */
export function sameEngine(one: string, other: string): boolean {
  return one.replace(/_dp\d+$/, "") === other.replace(/_dp\d+$/, "");
}

function isOwnHost(host: string): boolean {
  return /^(localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0|::|\*)$/i.test(host);
}

/** The error of an instance whose side channel has no known address. */
export function addressUnknown(role: Role): KvError {
  const flag = `--${role}-side-channel-port`;
  const message =
    role === "prefill"
      ? "the address of its side channel is not known before its first answer"
      : "the address of its side channel is not known";
  return new KvError("KV_CONFIG_INVALID", message, {
    hint: `vLLM does not announce it over HTTP: give ${flag}, or kv.port of the instance in a configuration or discovery file (vLLM's default: 5600); --pairing off ends this warning`,
  });
}

/**
 * Checks that a side channel is that of the engine that answers.
 *
 * @throws `KV_HANDSHAKE_INCOMPATIBLE` when the side channel is that of another engine than the one
 * that answers requests.
 */
export function requireAnsweredEngine(
  entry: Entry,
  facts: EngineFacts,
  { host, port }: SideChannelAddress,
): void {
  const { answered } = entry;
  if (answered === undefined || sameEngine(answered.engineId, facts.engineId)) return;
  // An engine that was read under the answered id has been restarted since.
  if ([...entry.engines.keys()].some((id) => sameEngine(id, answered.engineId))) return;
  throw new KvError(
    "KV_HANDSHAKE_INCOMPATIBLE",
    `the side channel ${host}:${port} is that of engine ${facts.engineId}, but the instance answers as engine ${answered.engineId}`,
    {
      hint: "give each server its own VLLM_NIXL_SIDE_CHANNEL_PORT, and each instance the address of its own side channel",
    },
  );
}

/** Instances of a list that fit. */
export interface Fitting<T extends PairedInstance = PairedInstance> {
  readonly all: readonly T[];
  /** Those of which it is known which engine they have. */
  readonly sure: readonly T[];
}
