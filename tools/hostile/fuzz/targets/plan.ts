import {
  planFromDocument,
  planToDocument,
} from "../../../../packages/kv-plan/src/data/plan-document.js";
import { buildEngineTransferPlan } from "../../../../packages/plan/src/index.js";
import { samplePair, sampleRank } from "../../../../packages/plan/src/sample-pair.test-support.js";
import { type FuzzTarget, json, parseJson } from "../target.js";

export const planDocument: FuzzTarget = {
  seeds: [
    json(planToDocument(buildEngineTransferPlan(samplePair()))),
    json(planToDocument(buildEngineTransferPlan(samplePair(sampleRank({ kernelBlockSize: 32 }))))),
  ],
  isJson: true,
  read(input) {
    const parsed = parseJson(input);
    if (parsed === undefined) return;
    planToDocument(planFromDocument(parsed.value));
  },
};
