import { type CacheSpec, pageBytes, specKey, unpaddedPageBytes } from "../model/cache-spec.js";
import { bucketsBy } from "../model/kv-cache-groups.js";
import type { ModelCaches } from "../model/model-caches.js";
import type { CacheReport } from "./report.js";

/** The caches of a rank by group and shape. */
export function cacheReports({ groups }: ModelCaches): readonly CacheReport[] {
  return groups.flatMap(({ layers }, group) =>
    [...bucketsBy(layers, ({ spec }) => specKey(spec)).values()].map((same) =>
      cacheReport(group, same.length, same[0]?.spec as CacheSpec),
    ),
  );
}

function cacheReport(group: number, layers: number, spec: CacheSpec): CacheReport {
  const isState = spec.class === "MambaSpec";
  return {
    ...{ group, layers, class: spec.class, blockTokens: spec.blockSize },
    pageBytes: pageBytes(spec),
    usedBytes: unpaddedPageBytes(spec),
    numKvHeads: isState ? null : spec.numKvHeads,
    headSize: isState ? null : spec.headSize,
    headSizeV: isState ? null : spec.headSizeV,
    windowTokens: isState ? null : (spec.slidingWindow ?? spec.attentionChunkSize ?? null),
    shapes: isState ? spec.shapes : null,
    dtypes: isState ? spec.dtypes : [spec.dtype],
  };
}
