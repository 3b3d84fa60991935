import { itMovesEveryGroup, itReadsEveryGroupBack } from "@kv/testing/groups/group-tests";
import { pullConnector } from "../src/index.js";

itMovesEveryGroup(pullConnector, false);
itReadsEveryGroupBack(pullConnector);
