import { itServesTheShapesOfTheGuide } from "@kv/testing/scenarios/guide-shapes";
import { pullConnector } from "../src/index.js";

itServesTheShapesOfTheGuide(pullConnector);
