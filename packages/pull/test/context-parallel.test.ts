import { itSharesSequences } from "@kv/testing/scenarios/context-parallel";
import { pullConnector } from "../src/index.js";

itSharesSequences(pullConnector);
