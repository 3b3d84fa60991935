import { type CacheSpec, pageBytes, specKey, unpaddedPageBytes } from "../model/cache-spec.js";
import type { ModelCaches } from "../model/model-caches.js";
import type { CacheReport } from "./report.js";

/** The caches of a rank by group and shape. */
export function cacheReports({ groups }: ModelCaches): readonly CacheReport[] {
  return groups.flatMap(({ layers }, group) => {
    const counts = new Map<string, { readonly spec: CacheSpec; layers: number }>();
    for (const { spec } of layers) {
      const key = specKey(spec);
      const known = counts.get(key);
      if (known === undefined) counts.set(key, { spec, layers: 1 });
      else known.layers += 1;
    }
    return [...counts.values()].map((each) => cacheReport(group, each.layers, each.spec));
  });
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
