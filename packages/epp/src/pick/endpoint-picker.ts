import { isIP } from "node:net";
import {
  decideDisaggregation,
  type Instance,
  type InstancePool,
  instanceName,
  type Partner,
  type PooledInstance,
  type RoutingContext,
  type Visit,
} from "@kv/fleet";
import {
  addressOf,
  cannotDisaggregate,
  type Fleet,
  type GenerationRequest,
  getOrAdd,
  hostOf,
} from "@kv/fleet/front-end";
import { overloaded } from "@kv/http";
import { KvError } from "@kv/interface";
import type { PickerSettings } from "../config/settings.js";

export interface PickContext extends RoutingContext {
  /** Absent when no text is generated, as for `GET /v1/models`. */
  readonly request?: GenerationRequest | undefined;
  /** The gateway's hint: `ip:port` of allowed instances. */
  readonly subset?: ReadonlySet<string> | undefined;
}

/** Visits count as load until the caller ends them. */
export interface Choice {
  readonly decode: Visit;
  readonly decoders: readonly PooledInstance[];
  /** Undefined if a decode instance serves alone. */
  readonly prefill: Visit | undefined;
  /** Each fits all `decoders`. */
  readonly prefillers: readonly PooledInstance[];
}

export interface EndpointPickerOptions {
  readonly fleet: Fleet;
  readonly settings: Pick<
    PickerSettings,
    "limits" | "fallbacks" | "unsplittable" | "disaggregateAbove"
  >;
}

export class EndpointPicker {
  constructor(private readonly options: EndpointPickerOptions) {}

  /**
   * @throws `KV_PROXY_NO_INSTANCE` (503) without an available pair; `KV_PROXY_OVERLOADED` (429)
   * when all decode instances are full; `KV_REQUEST_INVALID` for a request that cannot be split.
   */
  pick(context: PickContext): Choice {
    const { fleet, settings } = this.options;
    const { prefill: prefillers, decode: decoders } = fleet.pools;
    const alone = this.#isForDecodeAlone(context);
    const outPrefillers = alone ? NONE : excluded(prefillers, subsetOf(prefillers, context.subset));
    const outDecoders = excluded(decoders, context.subset);
    const { fallbacks, limits } = settings;
    const most = limits.requestsPerDecode ?? Number.POSITIVE_INFINITY;
    const partner = alone ? undefined : { avoiding: outPrefillers };
    const decode = chooseBelowLimit(decoders, context, { out: outDecoders, partner, most });
    if (decode === undefined) throw shed(decoders, outDecoders, most) ?? none(decoders, context);
    const others = (partners: readonly Instance[]) =>
      decoders
        .alternatives(fallbacks, new Set([...outDecoders, decode]), partners)
        .filter(
          ({ dataParallelRank: rank, inFlight }) =>
            rank === decode.dataParallelRank && inFlight < most,
        );
    if (alone || this.#oneLegPays(context, decode)) {
      const decoders = [decode, ...others([])];
      return { decode: decode.begin(), decoders, prefill: undefined, prefillers: [] };
    }
    const prefill = chooseBelowLimit(prefillers, context, { out: outPrefillers, partner: decode });
    if (prefill === undefined) throw none(prefillers, context, decode);
    const allDecoders = [decode, ...others([prefill])];
    const excluding = new Set([...outPrefillers, prefill]);
    return {
      decode: decode.begin(),
      decoders: allDecoders,
      prefill: prefill.begin(),
      prefillers: [prefill, ...prefillers.alternatives(fallbacks, excluding, allDecoders)],
    };
  }

  #isForDecodeAlone({ request }: PickContext): boolean {
    if (request === undefined) return true;
    const { disaggregationLimit: why } = request;
    if (why === undefined) return false;
    if (this.options.settings.unsplittable === "decode-computes") {
      this.options.fleet.ambient.metrics.count("kv_proxy_decode_alone_total");
      return true;
    }
    throw cannotDisaggregate(why);
  }

  #oneLegPays(context: PickContext, decode: PooledInstance): boolean {
    const { fleet, settings } = this.options;
    const { prefillCosts: costs } = fleet;
    const { disaggregateAbove: above } = settings;
    const { request } = context;
    // Only a prefill instance answers about the prompt.
    if (above === undefined || request === undefined || request.asksAboutPrompt) return false;
    const { decode: decoders } = fleet.pools;
    const { twoLegs, reason } = decideDisaggregation(
      {
        promptTokens: costs.promptTokens(request),
        decodeCachedTokens: decoders.cachedTokens(decode, context, costs.charactersPerToken) ?? 0,
        decodeInFlight: decode.inFlight,
      },
      above,
    );
    fleet.ambient.metrics.count("kv_proxy_disaggregation_total", 1, {
      legs: twoLegs ? "2" : "1",
      reason,
    });
    return !twoLegs;
  }
}

const NONE: ReadonlySet<Instance> = new Set();
const endpoints = new WeakMap<Instance, string>();

/** `ip:port`, as gateways name endpoints; names stay. */
export function endpointOf(instance: Instance): string {
  return getOrAdd(endpoints, instance, () => addressOf(instance.url));
}

/** Gateways take only addresses as destinations. */
export function hasAddress({ url }: { readonly url: string }): boolean {
  return isIP(hostOf(url)) !== 0;
}

/**
 * The hint concerns prefill instances only if it names one. The gateway's pool may hold decode
 * instances alone.
 */
function subsetOf(pool: InstancePool, subset: PickContext["subset"]): PickContext["subset"] {
  const named =
    subset !== undefined && pool.list().some((instance) => subset.has(endpointOf(instance)));
  return named ? subset : undefined;
}

const withoutAddress = new WeakMap<readonly Instance[], ReadonlySet<Instance>>();

function excluded(pool: InstancePool, subset: PickContext["subset"]): ReadonlySet<Instance> {
  const all = pool.list();
  let out = pool.role === "decode" ? withoutAddress.get(all) : NONE;
  if (out === undefined) {
    out = new Set(all.filter((instance) => !hasAddress(instance)));
    withoutAddress.set(all, out);
  }
  if (subset === undefined) return out;
  return new Set([...out, ...all.filter((instance) => !subset.has(endpointOf(instance)))]);
}

interface ChooseOptions {
  readonly out: ReadonlySet<Instance>;
  readonly partner: Partner | undefined;
  readonly most?: number;
}

/** Searches all instances only if the pool's choice is unavailable or full. */
function chooseBelowLimit(
  pool: InstancePool,
  context: PickContext,
  { out, partner, most = Number.POSITIVE_INFINITY }: ChooseOptions,
): PooledInstance | undefined {
  const isBelowLimit = (instance: PooledInstance) =>
    instance.available() && instance.inFlight < most;
  const chosen = pool.choose(context, out, partner);
  if (chosen === undefined || isBelowLimit(chosen)) return chosen;
  const busy = pool.list().filter((instance) => !isBelowLimit(instance));
  return pool.choose(context, new Set([...out, ...busy]), partner);
}

function shed(pool: InstancePool, out: ReadonlySet<Instance>, most: number): KvError | undefined {
  const busy = pool
    .list()
    .filter((instance) => !out.has(instance) && instance.available() && instance.inFlight >= most);
  if (busy.length === 0) return undefined;
  return overloaded({
    limit: "limits.requestsPerDecode",
    message: `each of the ${busy.length} decode instances that are available has ${most} requests in flight`,
    byClient: true,
  });
}

function none(pool: InstancePool, { subset }: PickContext, partner?: Instance): KvError {
  const { role } = pool;
  const all = pool.list();
  const error = (message: string, hint: string) =>
    new KvError("KV_PROXY_NO_INSTANCE", message, { hint });
  const fix = "GET /status of the metrics port shows the state of each instance";
  if (all.length === 0)
    return error(`there is no ${role} instance`, `name one with --${role}, or by discovery`);
  const named = all.filter((instance) => subset?.has(endpointOf(instance)) ?? true);
  if (named.length === 0 && role === "decode")
    return error(
      `none of the ${subset?.size ?? 0} endpoints of the gateway's subset hint is a decode instance`,
      "the hint names ip:port of the decode instances",
    );
  const within = named.length === 0 ? all : named;
  const able = within.filter((instance) => instance.available());
  if (able.length > 0 && role === "decode" && !able.some(hasAddress))
    return error(
      `no decode instance has an IP address: ${able.slice(0, 3).map(instanceName).join(", ")}`,
      "gateways take ip:port, so name decode instances by address",
    );
  const refusal =
    able.length === 0 ? undefined : pool.pairingRefusal(partner ?? { avoiding: NONE });
  if (refusal !== undefined)
    return error(
      `no ${role} instance fits ${role === "prefill" ? "the decode instance" : "a prefill instance"}: ${refusal}`,
      `run engines with equal compatibility hashes and sizes on both sides; ${fix}`,
    );
  const states = within.slice(0, 3).map((instance) => {
    const { state, last_error: last } = instance.status();
    return `${instanceName(instance)} is ${state}${last === null ? "" : ` (${last.message})`}`;
  });
  return error(`no ${role} instance is available: ${states.join("; ")}`, fix);
}
