/**
 * `@kv/kv-plan/data`: plans as JSON documents, their hash, and the difference between two of them.
 */
export { diffPlans, type PlanDifference } from "./plan-diff.js";
export {
  PLAN_DOCUMENT_VERSION,
  type PlanDocument,
  planDocumentSchema,
  planFromDocument,
  planToDocument,
} from "./plan-document.js";
export { hashPlan } from "./plan-hash.js";
