import { describeReferenceReuse } from "@kv/testing/scenarios/reference-reuse";
import { pullConnector } from "../src/index.js";

describeReferenceReuse(pullConnector, { sharesReferences: true });
