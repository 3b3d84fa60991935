import RELEASES from "./vllm-requests.json" with { type: "json" };

/**
 * What requests to a release of vLLM may contain: names by part, in vLLM's order. "request
 * /v1/completions" and other routes have the members of the request class, "engine request" what
 * the engine gets. "extra arguments written" has what becomes `SamplingParams.extra_args`
 * ("**name": all members of an object), "extra arguments read" what the engine reads there.
 */
export type VllmRequests = Readonly<Record<string, readonly string[]>>;

/**
 * Returns the requests of each described release, oldest first. `tools/vllm/request-members.ts`
 * reads them from vLLM's sources.
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
