"""The pages of the example apps, and the admin."""

from django.contrib import admin
from django.urls import path

from example_project.ai_jobs.views import page as ai_jobs
from example_project.live.views import page as live
from example_project.live.views import stream
from example_project.media.views import page as media
from example_project.tasks.views import page as tasks

urlpatterns = [
    path("", live, name="live"),
    path("live/stream", stream, name="live_stream"),
    path("media/", media, name="media"),
    path("tasks/", tasks, name="tasks"),
    path("ai-jobs/", ai_jobs, name="ai_jobs"),
    path("admin/", admin.site.urls),
]
