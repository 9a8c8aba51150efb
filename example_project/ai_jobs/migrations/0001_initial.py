import uuid

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("prompt", models.CharField(max_length=200)),
                ("queue", models.CharField(blank=True, help_text="Empty: the default queue.", max_length=50)),
                (
                    "state",
                    models.CharField(
                        choices=[("waiting", "Waiting"), ("finished", "Finished")], default="waiting", max_length=10
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="QueueEntry",
            fields=[
                ("job_id", models.UUIDField(primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=50)),
                ("body", models.JSONField()),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
    ]
