import { describeReferenceReuse } from "@kv/testing/scenarios/reference-reuse";
import { itKeepsUnverifiedKvOutOfTheCache } from "@kv/testing/scenarios/unverified-kv";
import { pushConnector } from "../src/index.js";

describeReferenceReuse(pushConnector, { sharesReferences: false });
itKeepsUnverifiedKvOutOfTheCache(pushConnector);
