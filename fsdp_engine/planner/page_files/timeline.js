// The zoom of the timeline.

const zoom = byId("zoom");
if (zoom !== null) {
  byId("zooming").hidden = false;
  zoom.addEventListener("input", () => {
    byId("step").style.setProperty("--zoom", zoom.value);
  });
}
