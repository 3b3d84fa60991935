import { delegateTo } from "@kv/connector/building-blocks";
import type { ConnectorModule, ConnectorRequest } from "@kv/interface";

/** A connector whose engine hands it no token ids. */
export function withoutTokens(module: ConnectorModule): ConnectorModule {
  const bare = (request: ConnectorRequest) => ({ ...request, promptTokenIds: undefined });
  return delegateTo(module, {
    async createScheduler(options) {
      const inner = await module.createScheduler(options);
      return delegateTo(inner, {
        matchedTokens: (request, ...rest) => inner.matchedTokens(bare(request), ...rest),
        afterAllocation: (request, ...rest) => inner.afterAllocation(bare(request), ...rest),
        requestFinished: (request, ...rest) => inner.requestFinished(bare(request), ...rest),
      });
    },
  });
}
