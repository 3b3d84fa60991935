import RELEASES from "./vllm-requests.json" with { type: "json" };

/**
 * What clients' requests to a release of vLLM may contain. Per part, the names in vLLM's order:
 * "request /v1/completions" and so for each route, the members of its request class; "engine
 * request", what the engine gets; "extra arguments written", what of a request becomes
 * `SamplingParams.extra_args`, where connectors read, with "**name" for all members of an object;
 * "extra arguments read", what the engine reads there.
 */
export type VllmRequests = Readonly<Record<string, readonly string[]>>;

/**
 * The requests of each release that is described, by its version, the oldest first.
 * `tools/vllm/request-members.ts` reads them from vLLM's sources.
 */
export function vllmRequests(): ReadonlyMap<string, VllmRequests> {
  return releases;
}

const releases: ReadonlyMap<string, VllmRequests> = new Map(
  Object.entries<Readonly<Record<string, string>>>(RELEASES).map(([release, parts]) => [
    release,
    Object.fromEntries(Object.entries(parts).map(([part, names]) => [part, names.split(" ")])),
  ]),
);
