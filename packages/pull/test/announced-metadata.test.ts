import { itReadsAnnouncedMetadata } from "@kv/testing/scenarios/announced-metadata";
import { pullConnector } from "../src/index.js";

itReadsAnnouncedMetadata(pullConnector);
