import { describeReferenceReuse } from "@kv/testing/scenarios/reference-reuse";
import { itKeepsUnverifiedKvOutOfTheCache } from "@kv/testing/scenarios/unverified-kv";
import { pullConnector } from "../src/index.js";

describeReferenceReuse(pullConnector, { sharesReferences: true });
itKeepsUnverifiedKvOutOfTheCache(pullConnector);
