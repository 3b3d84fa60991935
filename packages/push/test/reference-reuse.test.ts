import { describeReferenceReuse } from "@kv/testing/scenarios/reference-reuse";
import { pushConnector } from "../src/index.js";

describeReferenceReuse(pushConnector, { sharesReferences: false });
