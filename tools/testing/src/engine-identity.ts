import type { EngineIdentity, ModelIdentity } from "@kv/interface";

export const engineIdentity = (
  engineId: string,
  {
    tpSize = 1,
    ppSize = 1,
    dcpSize = 1,
    ...model
  }: { tpSize?: number; ppSize?: number; dcpSize?: number } & Partial<ModelIdentity> = {},
): EngineIdentity => ({
  engineId,
  tpSize,
  ppSize,
  dcpSize,
  dpRank: 0,
  model: {
    model: "m",
    vllmVersion: "0.33.0",
    connectorVersion: 15,
    isHmaEnabled: false,
    speculativeConfig: null,
    ...model,
  },
});
