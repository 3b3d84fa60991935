import type { FakeUpstream, Seen } from "@kv/testing/http/fake-upstream";

/** Whether a request has blocks freed: a decode instance is to refuse it. */
export const isRelease = (seen: Pick<Seen, "json">) => seen.json.use_beam_search === true;

/** How many legs of clients' requests an instance got. */
export const legsAt = ({ seen }: FakeUpstream) => seen.filter((one) => !isRelease(one)).length;

export const releasesAt = ({ seen }: FakeUpstream) => seen.filter(isRelease).length;
